"""Requests that wait for a place: their order, admission and refusal."""
