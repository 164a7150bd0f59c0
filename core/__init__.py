"""The vocabulary every layer shares: messages, plans, layouts, seams, errors and configuration. Stdlib and pydantic only."""
