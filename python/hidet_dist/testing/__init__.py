"""Models for tests, examples and benchmarks, with the same models in PyTorch for comparison."""
