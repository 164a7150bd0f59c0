"""A quicker simulation: production scheduler, policies and block accounting. Its own code composes steps, and takes equal decode
steps in bursts (ADR 110)."""
