"""What computes paged attention on a GPU: other people's kernels where they are installed, able and measured to be faster."""
