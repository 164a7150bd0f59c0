"""Images of requests: fetched, checked and made tokens."""
