"""Keeps KV of prefixes that the device has no room for: in host memory, and below that on a local disk."""
