"""The one seam to a GPU: memory, streams, events and copies, on CUDA, on processors, and simulated."""
