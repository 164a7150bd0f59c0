"""The cluster's configuration, a module per section."""
