"""The prefix cache and the block pool under it."""
