"""Pipelines in serving processes: a rank's stage, the messages between stages, and results on their way to ranks."""
