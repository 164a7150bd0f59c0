"""Proposals of what sequences will sample next, from tokens that are known."""
