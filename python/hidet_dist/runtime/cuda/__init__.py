"""The runtime's part for CUDA devices: device memory and streams, CUDA graphs, timing, cuBLAS and NCCL."""
