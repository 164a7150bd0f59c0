"""How much memory ranks need, and how large their KV pools are. Nothing here executes a step."""
