"""Models to parallelize in tests, examples and benchmarks, with the same models in PyTorch to compare with."""
