"""Tokenizers, and the text and bytes of tokens."""
