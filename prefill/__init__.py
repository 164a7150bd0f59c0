"""The prefill role: computes prompts in deadline order and hands their KV cache over."""
