"""Benchmarks of one instance."""
