"""Kernels of the CPU target for computations other than matrix products: loops over a definition, written as C++."""
