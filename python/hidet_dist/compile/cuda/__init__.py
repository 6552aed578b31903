"""What the CUDA target compiles in its own way: with nvcc, for a described GPU, on a machine that need not have one."""
