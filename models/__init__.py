"""Model architectures with full shapes, read from Hugging Face folders; they know no ranks and no processes."""
