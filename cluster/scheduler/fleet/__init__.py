"""What the scheduler knows of the living instances: loads, promises, cached prefixes and links."""
