"""Benchmarks of whole servers: doors, processes, start and memory."""
