"""Images: which models read them, what becomes of an image's pixels, and the rows that a vision tower makes of them."""
