"""The kernels of softmax, norms and attention, on the emulator, beside the same in float64."""

import hidet
import numpy as np
import pytest
import torch
from hidet import ops
from hidet.graph.ops.matmul.matmul import MatmulOp
from tests.emulator import emulated

from hidet_dist.compile import compile_program
from hidet_dist.compile.cuda.target import CudaTarget
from hidet_dist.machine import builtin
from hidet_dist.machine.gpu import GPUS
from hidet_dist.normalize import normalize
from hidet_dist.operators.reductions import amax, amin
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh

H100 = CudaTarget(GPUS["H100-SXM5-80GB"])
MASKED = -1e9
EPSILON = 1e-5


@pytest.fixture
def run(emulator, monkeypatch):
    """A function of tensors compiled for CUDA, and run kernel by kernel: its result, and what its kernels compute."""
    monkeypatch.setenv("CUDA_HOME", str(emulator.home))

    def run(function, *arrays, environment=None):
        inputs = [hidet.symbol(list(x.shape), str(x.dtype).removeprefix("torch."), "cpu") for x in arrays]
        graph = normalize(hidet.trace_from(function(*inputs), inputs))
        plan = search(graph, builtin("dgx-h100", DeviceMesh((1,)))).plan
        program = compile_program(partition_graph(graph, plan.stages[0], target=H100), H100)
        values = dict(zip(program.graph.inputs, arrays, strict=True))
        names = []
        for node, kernel in zip(program.graph.nodes, program.kernel_of_node, strict=True):
            (y,) = node.outputs
            shape = [int(n) for n in y.shape]
            dtype = getattr(torch, y.dtype.name)
            if node.share_map:
                values[y] = values[node.inputs[0]].reshape(shape)
                continue
            given = [bits(values[x]) for x in node.inputs]
            empty = bits(torch.full(shape, torch.nan, dtype=dtype))
            found = emulated.run(program.kernels[kernel], *given, empty, environment=environment)
            values[y] = torch.from_numpy(found[-1]).view(dtype)
            names.append(node.task.attrs.get("fused_ops", node.task.name))
        (y,) = program.graph.outputs
        return values[y].double(), names

    return run


def bits(x):
    """NumPy has no bfloat16."""
    return x.view(torch.int16).numpy() if x.dtype == torch.bfloat16 else x.numpy()


def random(*shape, dtype=torch.float32, scale=1.0):
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)


def causal(queries, keys):
    return torch.from_numpy(np.triu(np.full((1, 1, queries, keys), MASKED, np.float32), 1 + keys - queries))


@pytest.mark.parametrize(
    ("length", "dtype", "most"),
    [
        (5000, torch.float16, 1e-3),
        pytest.param(77, torch.float16, 1e-3, marks=pytest.mark.slow),
        pytest.param(128, torch.bfloat16, 1e-2, marks=pytest.mark.slow),
        pytest.param(5000, torch.float32, 1e-6, marks=pytest.mark.slow),
    ],
)
def test_softmax_is_one_kernel(run, length, dtype, most):
    """With its scale, its mask and casts; a row that is masked as a whole is no NaN."""
    x = random(2, 3, 5, length, dtype=dtype, scale=4)
    mask = causal(5, length)
    mask[..., 3, :] = MASKED

    def masked(x, mask):
        return ops.cast(ops.softmax(ops.cast(x, "float32") * 0.5 + mask, -1), x.dtype)

    y, names = run(masked, x, mask)
    assert len(names) == 1
    expected = torch.softmax((x.float() * 0.5 + mask).double(), -1)
    assert (y - expected).abs().max() < most
    assert torch.allclose(y.sum(-1), torch.ones(()).double(), atol=most * 4)


@pytest.mark.slow
def test_unmatched_operators_are_left_to_hidet(run):
    """Along another dim; with what lies between read elsewhere, too."""
    x = random(4, 6)
    y, names = run(lambda x: ops.softmax(x, 0), x)
    assert torch.allclose(y, torch.softmax(x.double(), 0))
    assert not any("row_softmax" in name for name in names)


@pytest.mark.parametrize("length", [33, pytest.param(768, marks=pytest.mark.slow)])
def test_a_norm_is_one_kernel_with_what_is_around_it(run, length):
    x, scale = random(2, 3, length, dtype=torch.float16, scale=3) + 5, random(length)

    def norm(x, scale):
        return ops.cast(ops.layer_norm(ops.cast(x, "float32"), epsilon=EPSILON) * scale, "float16")

    y, names = run(norm, x, scale)
    assert len(names) == 1
    expected = torch.nn.functional.layer_norm(x.double(), [length], scale.double(), eps=EPSILON)
    assert torch.allclose(y, expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "power",
    [
        lambda x: ops.pow(x, hidet.from_torch(torch.tensor(2.0))),
        pytest.param(lambda x: x * x, marks=pytest.mark.slow),
        pytest.param(ops.square, marks=pytest.mark.slow),
    ],
)
def test_a_root_mean_square_norm_is_one_kernel(run, power):
    """Also of elements whose squares float16 does not hold."""
    x, scale = random(3, 300, dtype=torch.float16, scale=1000), random(300)

    def norm(x, scale):
        wide = ops.cast(x, "float32")
        factor = ops.rsqrt(ops.mean(power(wide), dims=-1, keep_dim=True) + EPSILON)
        return ops.cast(wide * factor * scale, "float16")

    y, names = run(norm, x, scale)
    assert len(names) == 1
    expected = torch.nn.functional.rms_norm(x.double(), [300], scale.double(), eps=EPSILON)
    assert torch.allclose(y, expected, rtol=2e-3, atol=2e-3)


def attention(q, k, v, mask):
    """In float64, but for the mask, beside whose numbers float32 has no room for scores."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = (q.double() @ k.mT / np.sqrt(q.shape[-1])).float() + mask
    return torch.softmax(scores.double(), -1) @ v


def heads(batch, count, length, size, dtype, seed):
    return random(seed + batch, count, length, size, dtype=dtype)[seed:]


# Queries and keys that are no multiple of a tile's, fewer of one than of the other, and the longest head.
ATTENTION = [
    pytest.param(2, 3, 45, 150, 32, torch.float16, 2e-3, id="ragged", marks=pytest.mark.slow),
    pytest.param(1, 2, 1, 70, 16, torch.float16, 2e-3, id="a query", marks=pytest.mark.slow),
    pytest.param(1, 2, 80, 33, 128, torch.bfloat16, 2e-2, id="bfloat16", marks=pytest.mark.slow),
    pytest.param(2, 2, 45, 101, 48, torch.float32, 1e-5, id="float32"),
]


@pytest.mark.parametrize(("batch", "count", "queries", "keys", "size", "dtype", "most"), ATTENTION)
def test_attention_is_one_kernel(run, batch, count, queries, keys, size, dtype, most):
    q = heads(batch, count, queries, size, dtype, 1)
    k, v = (heads(batch, count, keys, size, dtype, seed) for seed in (2, 3))
    mask = causal(queries, keys)
    mask[..., 0, :] = MASKED

    def mixed(q, k, v, mask):
        scores = ops.cast(MatmulOp(q, k, transpose_b=True).outputs[0], "float32") / float(np.sqrt(size)) + mask
        return ops.cast(ops.softmax(scores, -1), v.dtype) @ v

    for environment in ({}, {"EMULATED_COPIES": "eager", "EMULATED_WARPS": "reverse"}):
        y, names = run(mixed, q, k, v, mask, environment=environment)
        assert names == ["attention"]
        assert (y - attention(q, k, v, mask)).abs().max() < most


@pytest.mark.slow
def test_keys_that_are_minus_infinity_away_are_none(run):
    """Also where they fill the first tile; a row without any key is NaN, as softmax has it."""
    q, k, v = (heads(1, 2, 100, 16, torch.float16, seed) for seed in (1, 2, 3))
    mask = torch.zeros(1, 1, 1, 100)
    mask[..., :80] = -torch.inf
    whole = torch.cat([mask, torch.full_like(mask, -torch.inf)], 2).repeat(1, 1, 50, 1)

    def mixed(q, k, v, mask):
        scores = ops.cast(q @ ops.transpose(k, [0, 1, 3, 2]) * 0.25, "float32") + mask
        return ops.cast(ops.softmax(scores, -1), "float16") @ v

    y, names = run(mixed, q, k, v, whole)
    assert names[-1] == "attention"
    assert torch.isnan(y[:, :, 1::2]).all()
    assert (y - attention(q, k, v, whole))[:, :, ::2].abs().max() < 2e-3


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float16, 5e-3), pytest.param(torch.float32, 1e-5, marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_heads_in_groups_are_read_as_they_are_and_queries_rotated_on_the_way(run, dtype, most):
    batch, count, kept, length, size = 2, 4, 2, 70, 32
    shape = (batch, length, count, size)
    q = random(*shape, dtype=dtype)
    k, v = (random(batch, length, kept, size, dtype=dtype, scale=scale) for scale in (1.0, 0.5))
    cosine, sine = (random(length, size, dtype=dtype, scale=scale) for scale in (1.0, 0.7))

    def by_head(x):
        return ops.permute_dims(x, [0, 2, 1, 3])

    def grouped(x):
        wide = ops.broadcast(ops.reshape(x, [batch, kept, 1, length, size]), [batch, kept, 2, length, size])
        return ops.reshape(wide, [batch, count, length, size])

    def mixed(q, k, v, cosine, sine):
        q, k, v = by_head(q), grouped(by_head(k)), grouped(by_head(v))
        left, right = q[:, :, :, : size // 2], q[:, :, :, size // 2 :]
        q = q * cosine + ops.concat([-right, left], axis=3) * sine
        scores = q @ ops.permute_dims(k, [0, 1, 3, 2]) / float(np.sqrt(size))
        return ops.reshape(by_head(ops.softmax(scores, -1) @ v), [batch, length, count * size])

    y, names = run(mixed, q, k, v, cosine, sine)
    assert [name for name in names if "attention" in name] == names[-1:]
    assert not any("broadcast" in name for name in names)
    assert len(names) == 3  # keys and values are put in order
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    left, right = q.chunk(2, -1)
    q = (q * cosine.double() + torch.cat([-right, left], -1) * sine.double()).to(dtype)
    expected = attention(q, k, v, 0).transpose(1, 2).reshape(batch, length, -1)
    assert (y - expected).abs().max() < most


def test_extremes_keep_nan(run):
    x, half, brain = (random(4, 64, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.bfloat16))
    x[0, 5], x[1, :], half[2, 40], brain[3, 7] = torch.nan, -torch.inf, torch.nan, torch.nan

    def function(a, b, c):
        short = ops.minimum(ops.relu(b), b).to("float32") + ops.maximum(c, c * 2.0).to("float32")
        return ops.max(ops.maximum(ops.minimum(a, a * 2.0), a) + ops.minimum(short, short * 0.5), [1])

    short = half.relu().minimum(half).float() + brain.maximum(brain * 2).float()
    expected = (x.minimum(x * 2).maximum(x) + short.minimum(short * 0.5)).amax(1)
    torch.testing.assert_close(
        run(function, x, half, brain)[0], expected.double(), equal_nan=True, rtol=1e-2, atol=1e-2
    )
    assert expected.isnan().tolist() == [True, False, True, True]


@pytest.mark.slow
def test_extremes_of_what_ranks_exchange_keep_nan(run):
    x = random(2, 72, scale=4.0)
    x[0, 3], x[1, 40], x[:, 70], x[:, 71] = torch.nan, torch.nan, torch.nan, -torch.inf

    def function(x):
        return ops.concat([amax(x, 0), ops.cast(amin(ops.cast(x, "bfloat16"), 0), "float32")], 0)

    expected = torch.cat([x.amax(0), x.bfloat16().amin(0).float()]).double()
    assert torch.equal(run(function, x)[0].nan_to_num(1e9), expected.nan_to_num(1e9))
