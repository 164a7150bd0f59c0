"""Carries a planned step out on one device: model, KV pool, sampling, captured graphs."""
