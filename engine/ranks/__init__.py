"""An instance over many ranks: processes of their own, started together, that execute every step together."""
