"""Serving on CUDA devices: device memory, the stream that a partition runs on, graphs and timing."""
