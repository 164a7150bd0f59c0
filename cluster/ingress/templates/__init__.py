"""Chat templates: what a model's own template makes of a conversation."""
