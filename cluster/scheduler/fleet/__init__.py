"""What the scheduler knows of the living instances: loads, reservations, cached prefixes and links."""
