"""Finds the kernels that multiplied in oneDNN's verbose log."""

import re
from collections import Counter

VERBOSE = {"ONEDNN_VERBOSE": "1", "DNNL_VERBOSE": "1"}
"""The environment in which oneDNN writes a line for each operation, by its new name and by its old one."""
_PRODUCT = re.compile(r"^onednn_verbose,.*?\bexec,[^,]*,(?:matmul|inner_product),([^,\n]+),", re.MULTILINE)


def multiplied_by(log: str) -> str:
    """Return the names of the kernels of products, the most frequent first; `unknown` for a log that has none."""
    found = Counter(_PRODUCT.findall(log))
    return ", ".join(name for name, _ in found.most_common()) or "unknown"
