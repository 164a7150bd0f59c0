"""Benchmarks of ranks: processes, grids and the balance of experts."""
