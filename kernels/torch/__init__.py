"""The operations in pure PyTorch: the specification, and what runs on CPUs."""
