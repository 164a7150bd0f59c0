"""Benchmarks of KV transfers."""
