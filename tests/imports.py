"""What a new process checks once it has imported hidet and hidet_dist, in whichever order."""

CHECKED_IMPORTS = """
import sys
from hidet.ir.compute import cops
assert cops.matmul.__module__ == "hidet_dist.compat.matmul_definition"
assert not {"hidet_dist.search", "pulp", "highspy"} & set(sys.modules)
assert hidet.distributed.auto_parallel is hidet_dist.auto_parallel
assert set(hidet_dist.__all__) <= set(dir(hidet.distributed)) & set(dir(hidet_dist))
assert not hasattr(hidet.distributed, "nonsense") and not hasattr(hidet_dist, "nonsense")
from hidet_dist.partitioning import Program
assert hidet.distributed.partition is hidet_dist.partition is hidet_dist.api.partition
"""
