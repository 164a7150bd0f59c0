"""What clients' bodies have in common, whichever API they are for."""
