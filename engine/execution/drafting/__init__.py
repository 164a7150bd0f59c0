"""Draft models and draft heads, and the proposal of draft tokens."""
