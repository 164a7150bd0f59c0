"""What the next step computes: sequences, their blocks, and the step scheduler."""
