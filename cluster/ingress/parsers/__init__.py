"""Reads a model's text, in whatever markup its family writes: text, reasoning and tool calls, as they come."""
