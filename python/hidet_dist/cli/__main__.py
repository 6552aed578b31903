"""``python -m hidet_dist.cli``: the same as ``hidet-dist``."""

from hidet_dist.cli import main

main()
