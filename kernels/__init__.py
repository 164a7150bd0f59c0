"""Operations of the forward pass: their specification, and how each device computes them."""
