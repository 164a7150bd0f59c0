"""Descriptions of models, without weights."""
