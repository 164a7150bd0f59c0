"""Uploaded files, and batches of requests from them, kept in a folder that all ingresses share."""
