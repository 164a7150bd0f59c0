"""Kernels for x86 processors: C++ behind a C ABI in `src`, and the torch operators over it."""
