"""How many instances each pool should have."""
