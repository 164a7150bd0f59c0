"""Pictures: which models read them, what becomes of a picture's pixels, and the rows that a vision tower makes of them."""
