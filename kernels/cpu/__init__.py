"""Kernels for x86-64 and ARM processors: C++ behind a C ABI in `src`, and the torch operators over it."""
