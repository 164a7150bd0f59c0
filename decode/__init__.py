"""The decode role: receives KV caches, generates tokens, and computes prompts itself where that is cheaper."""
