"""Models for tests, examples and benchmarks, with PyTorch equivalents for comparison."""
