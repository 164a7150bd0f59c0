"""Baton: a disaggregated LLM inference cluster."""
