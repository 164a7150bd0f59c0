"""The formats in which checkpoints store their weights."""
