"""Which instances serve a request: predictions, costs and policies."""
