"""OpenAI's HTTP API over a generator of tokens; knows nothing of Ray, workers or torch."""
