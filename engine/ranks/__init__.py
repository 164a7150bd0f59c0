"""An instance over many ranks: processes of their own that are started together and execute every step together."""
