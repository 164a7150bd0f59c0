"""Tests on what other people published: tokenizers, templates, weights, clients."""
