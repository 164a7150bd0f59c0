"""Answers which fleet serves a load within its targets."""
