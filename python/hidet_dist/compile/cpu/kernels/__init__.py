"""Kernels of the CPU target for what is no matrix product: loops over a computation's definition, written as C++."""
