"""Proposals of what sequences will draw next, from tokens that are known."""
