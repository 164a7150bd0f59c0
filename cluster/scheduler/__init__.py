"""The global scheduler: places every request on an instance, or makes it wait, or refuses it."""
