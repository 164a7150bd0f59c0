"""What an ingress records of its requests: metrics, traces and timelines."""
