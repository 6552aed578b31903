"""Split a two-layer perceptron over two processes, and compare what they compute with NumPy."""

import os
import sys

import numpy as np

import hidet_dist
from hidet_dist import launch

rng = np.random.default_rng(0)
x, w1, w2 = (rng.standard_normal(shape, "float32") / 16 for shape in ([8, 256], [256, 1024], [1024, 256]))

if "RANK" not in os.environ:  # once: plan for two devices of 1.2 MB each, compile, write the artifacts, start two ranks
    import hidet

    y = hidet.ops.relu(hidet.symbol([8, 256]) @ hidet.asarray(w1)) @ hidet.asarray(w2)
    result = hidet_dist.auto_parallel(hidet.trace_from(y), {"mesh_shape": [2]}, {"mem_budget": 1_200_000}, "out/first")
    print("\n".join(result.plan.explain().schedule), flush=True)
    sys.exit(launch.main(["-n", "2", __file__]))

with hidet_dist.load_partition("out/first") as model:  # in each rank
    difference = np.abs(model(x) - np.maximum(x @ w1, 0) @ w2).max()
    print(f"rank {model.rank}: the largest difference from NumPy is {difference:.1e}")
