"""How bytes get from one instance's KV pool into another's: one module for each way."""
