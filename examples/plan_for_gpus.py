"""Plan a decoder's gated MLP for the eight GPUs of a DGX H100, without the GPUs and without the weights' data."""

import hidet
import rich

import hidet_dist

HIDDEN, INNER, TOKENS = 4096, 14336, 2048

gate = hidet_dist.weight("gate", [HIDDEN, INNER], "float16")
up = hidet_dist.weight("up", [HIDDEN, INNER], "float16")
down = hidet_dist.weight("down", [INNER, HIDDEN], "float16")
x = hidet.symbol([TOKENS, HIDDEN], "float16")
graph = hidet.trace_from((hidet.ops.silu(x @ gate) * (x @ up)) @ down, [x])

machine = {"mesh_shape": [8], "machine": "dgx-h100"}
plan = hidet_dist.make_plan(graph, machine, {"target": "cuda", "mem_budget": 100 * 2**20})  # of 336 MiB of weights
rich.print(plan.table())
print("\n".join(plan.explain().schedule))
