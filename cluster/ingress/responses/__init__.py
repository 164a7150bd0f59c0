"""OpenAI's Responses and conversations."""
