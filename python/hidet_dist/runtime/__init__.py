"""The processes' side of a parallel run: they find one another, and communicate for the compiled kernels."""
