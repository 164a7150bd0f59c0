"""Captured steps, and the steps computed before serving."""
