"""Checks clients' grammars in a process of its own."""
