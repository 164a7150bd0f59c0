"""How fast and how true the simulator is."""
