"""Benchmarks of prefix caches and their tiers."""
