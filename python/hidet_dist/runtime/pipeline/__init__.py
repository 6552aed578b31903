"""Pipelines in serving processes: a rank's stage, messages between stages, and the delivery of results to ranks."""
