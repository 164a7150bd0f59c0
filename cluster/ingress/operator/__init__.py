"""Routes for those who operate the server."""
