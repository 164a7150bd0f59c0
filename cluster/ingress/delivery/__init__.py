"""Requests on their way through the cluster, and the tokens that come back."""
