"""hidet's attention on CPUs, with more keys than queries and fewer, causal and with a mask, against PyTorch."""

import hidet
import numpy as np
import torch
from hidet.graph.ops.attention import attention

import hidet_dist
from hidet_dist.compile import optimize_program
from hidet_dist.rules.access import analyze
from hidet_dist.simulate import simulate


def test_attention_reads_all_keys_and_no_later_ones():
    rng = np.random.default_rng(0)
    shapes = [[1, 2, 3, 8], [1, 2, 8, 5], [1, 2, 5, 8], [1, 1, 3, 5]]
    x = [hidet.symbol(shape, "float16", "cpu") for shape in shapes]
    given = [rng.standard_normal(shape).astype(np.float16) for shape in shapes]
    outputs = [attention(*x), attention(*x[:3], is_causal=True)]
    assert _keys_read(outputs[0].op.task) == 3, "hidet's definition is right now: drop compile/cpu/attention.py"
    graph = hidet.trace_from(outputs, x)
    program = hidet_dist.partition(graph, hidet_dist.make_plan(graph, {"mesh_shape": [1]}))
    query, key, value, mask = (torch.from_numpy(own).double() for own in given)
    scores = query @ key
    hidden = torch.ones(3, 5).triu(1).bool()
    results = simulate(program, given, optimize_program(program))
    for got, wanted in zip(results, (scores + mask, scores.masked_fill(hidden, -torch.inf)), strict=True):
        np.testing.assert_allclose(got, (torch.softmax(wanted, -1) @ value).numpy(), atol=4e-3)


def _keys_read(task):
    """The number of keys that a definition of attention reads."""
    values = [access for access in analyze(task).accesses if access.tensor == 2]
    return max(access.indices[-2].maximum for access in values) + 1
