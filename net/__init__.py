"""Authenticated message channels between Baton's processes, and their in-process twin."""
