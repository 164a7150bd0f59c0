"""The global scheduler: it places every request on an instance, makes it wait, or refuses it."""
