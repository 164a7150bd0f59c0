"""The layers of Baton's own forward pass."""
