"""The operations as Triton kernels, one idea per file. Import only where triton is installed (`kernels.select` sees to it)."""
