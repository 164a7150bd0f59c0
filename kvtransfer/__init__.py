"""How a prompt's KV cache travels from a prefill instance to a decode instance, and who may write which block."""
