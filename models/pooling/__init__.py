"""From hidden states to embeddings and scores."""
