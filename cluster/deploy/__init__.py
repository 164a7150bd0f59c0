"""The Ray Serve application around the workers, and how it is started and stopped."""
