"""The command line: ``hidet-dist``, also ``python -m hidet_dist.cli``."""

from hidet_dist.cli.app import main

__all__ = ["main"]
