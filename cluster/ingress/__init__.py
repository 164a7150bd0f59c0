"""The endpoint: HTTP in, requests placed and submitted, tokens out, and what is observed of them."""
