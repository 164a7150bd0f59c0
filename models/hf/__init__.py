"""Models whose layers transformers computes."""
