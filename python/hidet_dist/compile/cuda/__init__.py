"""The CUDA target: built with nvcc for a described GPU, on a machine that need not have one."""
