"""What devices and models of the catalogue cost."""
