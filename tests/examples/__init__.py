"""Each example runs as its page says."""
