"""The memories of an instance on hosts that are not its own."""
