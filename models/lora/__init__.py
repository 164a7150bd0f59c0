"""Adapters: low-rank matrices (arXiv:2106.09685) beside a model's own, in the files that PEFT writes."""
