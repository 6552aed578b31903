"""Writing of artifacts (plans, kernels and weight shards) in the format that ``hidet_dist.artifacts`` describes."""
