"""Checkpoints written anew with their matrices in fewer bits."""
