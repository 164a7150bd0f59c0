"""Benchmarks of the global scheduler."""
