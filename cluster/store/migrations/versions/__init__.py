"""One step a file, named after its number."""
