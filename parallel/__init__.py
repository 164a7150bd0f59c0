"""Where the ranks of an instance sit, and which slice of the KV cache each of them holds."""
