"""The cluster: placing requests, the OpenAI endpoint, and the Ray Serve deployments around the workers."""
