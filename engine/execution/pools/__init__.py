"""KV pools in a device's memory."""
