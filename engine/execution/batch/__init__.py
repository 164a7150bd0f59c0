"""A step's packed tensors, and how they reach the device."""
