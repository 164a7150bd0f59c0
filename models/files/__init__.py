"""Finds a model's files, and names what they contain."""
