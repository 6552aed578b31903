"""Modules of PyTorch as graphs: names, nesting, what is refused, and results of sharded programs."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import hidet
import numpy as np
import pytest
import torch
from tests.frontends.evaluated import evaluated
from torch import nn
from torch.nn import functional

import hidet_dist
from hidet_dist.errors import InputError, TraceError, UnsupportedModelError
from hidet_dist.simulate import simulate
from hidet_dist.soundness.plans import evaluate_graph
from hidet_dist.spec.interface import Interface, interface_of


def interface(graph: hidet.FlowGraph) -> Interface:
    found = interface_of(graph)
    assert found is not None
    return found


def sharded(
    module: nn.Module, inputs: Any, mesh: tuple[int, ...] = (2,), compiled: bool = False, **options: Any
) -> Any:
    """The module's result, nested, from its program on all ranks."""
    graph = hidet_dist.from_torch(module.eval(), inputs)
    plan = hidet_dist.make_plan(graph, {"mesh_shape": list(mesh)}, options)
    own = interface(graph)
    flat = own.flatten(**inputs) if isinstance(inputs, Mapping) else own.flatten(*inputs)
    run = simulate if compiled else evaluated
    return own.nest(run(hidet_dist.partition(graph, plan), [x.numpy() for x in flat]))


def expect(module: nn.Module, inputs: Any, mesh: tuple[int, ...] = (2,), **options: Any) -> None:
    """Compare a module's sharded program with the module: one tensor."""
    got = sharded(module, inputs, mesh, **options)
    with torch.no_grad():
        want = module(**inputs) if isinstance(inputs, Mapping) else module(*inputs)
    np.testing.assert_allclose(got, want.numpy(), rtol=1e-4, atol=1e-4)


class Tied(nn.Module):
    """A vocabulary that is looked up in and multiplied by, and a buffer that is no part of the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.tensor([0.5, 2.0] * 4))
        self.register_buffer("places", torch.arange(32), persistent=False)
        self.positions = nn.Embedding(32, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids) * self.scale + self.positions(self.places[: ids.shape[1]])
        y: torch.Tensor = self.head(x)
        return y


class Skip(nn.Module):
    """A ReLU in place of a tensor that a skip connection keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.relu = nn.Linear(8, 8), nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(x)
        y = self.relu(h)
        return torch.cat([h, y * 2], dim=-1)


class Grams(nn.Module):
    """Products of equal shapes, of a matrix with itself and with others."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first = a @ a.T
        second = first @ b.T
        return torch.stack([first, second, b @ a.T, (b + 1) @ b.T])


class Result(NamedTuple):
    total: torch.Tensor
    parts: list[torch.Tensor]
    loss: torch.Tensor | None


class Nested(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor], options: dict[str, Any], flip: bool = False) -> Any:
        a, b = pair
        if flip:
            a, b = b, a
        return Result(a + b * options["scale"], [a - b, a * 2], None), {"mask": a > b}


def test_weights_go_by_their_names_and_tied_ones_are_one():
    graph = hidet_dist.from_torch(Tied().eval(), torch.zeros(2, 4, dtype=torch.int64))
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]})
    named = {weight.label: weight.shape for weight in plan.stages[0].weights if weight.label}
    assert named == {"words.weight": (16, 8), "scale": (8,), "positions.weight": (32, 8)}
    assert [x.label for x in plan.stages[0].inputs] == ["ids"]


def test_tied_weights_compute_what_the_module_does():
    torch.manual_seed(0)
    expect(Tied(), (torch.randint(0, 16, (2, 4)),))


def test_a_skip_connection_reads_the_value_written_in_place():
    torch.manual_seed(0)
    expect(Skip(), (torch.randn(4, 8),))


def test_equal_calls_of_other_operands_are_told_apart():
    torch.manual_seed(0)
    expect(Grams(), (torch.randn(4, 4), torch.randn(4, 4)))


class Difference(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x - 2 * y


def test_one_example_for_two_arguments_stands_for_two_arguments():
    example = torch.zeros(3)
    graph = hidet_dist.from_torch(Difference().eval(), (example, example))
    (got,) = evaluate_graph(graph, [np.array([5.0, 6.0, 7.0]), np.array([1.0, 2.0, 3.0])])
    assert got.tolist() == [3.0, 2.0, 1.0]


class Largest(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.max(x, 1), torch.Size([2])


def test_results_of_torch_with_named_parts_keep_them():
    x = torch.tensor([[1.0, 3.0, 2.0], [5.0, 4.0, 0.0]])
    own = interface(hidet_dist.from_torch(Largest().eval(), x))
    assert own.output_names == ("output.0.values", "output.0.indices")
    largest, size = own.nest([np.array([3.0, 5.0]), np.array([1, 0])])
    np.testing.assert_array_equal(largest.values, [3.0, 5.0])
    _, indices = largest
    assert indices is largest.indices
    np.testing.assert_array_equal(indices, [1, 0])
    assert Interface.from_plain(own.to_plain()) == own
    assert tuple(size) == (2,)


def test_arguments_and_results_keep_names_and_nesting():
    a, b, scale = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]), torch.tensor([2.0, 4.0])
    inputs = ((a, b), {"scale": scale}, True)
    graph = hidet_dist.from_torch(Nested().eval(), inputs)
    own = interface(graph)
    assert own.input_names == ("pair.0", "pair.1", "options.scale")
    assert own.output_names == ("output.0.total", "output.0.parts.0", "output.0.parts.1", "output.1.mask")
    assert Interface.from_plain(own.to_plain()) == own
    first, second = sharded(Nested(), inputs)
    np.testing.assert_array_equal(first.total, (b + a * scale).numpy())
    np.testing.assert_array_equal(first["parts"][0], (b - a).numpy())
    assert first.loss is None
    assert len(first) == 3
    np.testing.assert_array_equal(second["mask"], (b > a).numpy())
    flat = own.flatten(options={"scale": scale}, pair=(a, b))
    assert [x is y for x, y in zip(flat, (a, b, scale), strict=True)] == [True] * 3
    for wrong in ({"pair": (a, b)}, {"pair": a, "options": {}}, {"other": a}):
        with pytest.raises(InputError):
            own.flatten(**wrong)
    with pytest.raises(InputError, match="flip"):
        own.flatten((a, b), {"scale": scale}, False)


def test_a_module_on_the_meta_device_is_planned_without_data():
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(4096, 16384), nn.GELU(), nn.Linear(16384, 4096)).bfloat16()
        x = torch.empty(64, 4096, dtype=torch.bfloat16)
    graph = hidet_dist.from_torch(module.eval(), x)
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [8]}, {"mem_budget": 2**26})
    specs = {weight.label: str(weight.spec) for weight in plan.stages[0].weights}
    # Columns of the first matrix (its rows here), then rows of the second: Shoeybi et al. 2019, section 3.
    assert specs["0.weight"] == "(S0, R)"
    assert specs["2.weight"] == "(R, S0)"
    assert all(parameter.device.type == "meta" for parameter in module.parameters())


def test_objects_of_imported_modules_are_not_collected_while_a_module_is_traced():
    frozen = []

    class Noting(nn.Module):
        def forward(self, x):
            frozen.append(gc.get_freeze_count())
            return x + 1

    hidet_dist.from_torch(Noting().eval(), torch.zeros(2, 3))
    assert min(frozen) > 0
    assert gc.get_freeze_count() == 0


def test_dynamic_dims_are_symbolic_by_the_users_names():
    torch.manual_seed(0)
    module = Tied().eval()
    seq = torch.export.Dim("tokens", min=2, max=32)
    graph = hidet_dist.from_torch(module, torch.zeros(2, 4, dtype=torch.int64), ({1: seq},))
    assert [str(size) for size in graph.inputs[0].shape] == ["2", "tokens"]
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, {"symbols": {"tokens": 8}})
    program = hidet_dist.partition(graph, plan)
    for tokens in (3, 10):
        ids = torch.randint(0, 16, (2, tokens))
        with torch.no_grad():
            want = module(ids).numpy()
        np.testing.assert_allclose(simulate(program, [ids.numpy()])[0], want, rtol=1e-4, atol=1e-4)


def test_an_exported_program_is_the_graph_of_its_module(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, 16, (2, 4))
    module = Tied().eval()
    torch.export.save(torch.export.export(module, (), {"ids": ids}), tmp_path / "tied.pt2")
    graph = hidet_dist.from_torch(torch.export.load(tmp_path / "tied.pt2"))
    plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]})
    assert sorted(weight.label for weight in plan.stages[0].weights if weight.label) == [
        "positions.weight", "scale", "words.weight",
    ]  # fmt: skip
    flat = interface(graph).flatten(ids=ids)
    got = simulate(hidet_dist.partition(graph, plan), [x.numpy() for x in flat])
    np.testing.assert_allclose(interface(graph).nest(got), module(ids).detach().numpy(), rtol=1e-4, atol=1e-4)
    with pytest.raises(TraceError, match="leave example_inputs"):
        hidet_dist.from_torch(torch.export.load(tmp_path / "tied.pt2"), ids)


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Bilinear(4, 4, 2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.linalg.qr(x)[0]
        return torch.special.bessel_j0(y) + torch.linalg.qr(x)[0] + self.inner[0](x, x).sum()


def test_all_that_is_missing_is_named_at_once_and_where():
    with pytest.raises(UnsupportedModelError) as caught:
        hidet_dist.from_torch(Unsupported().eval(), torch.zeros(4, 4))
    missing = {call.operator for call in caught.value.missing}
    assert {"aten.linalg_qr.default", "aten.special_bessel_j0.default"} <= missing
    assert all("test_from_torch.py" in call.line for call in caught.value.missing if "bessel" in call.operator)
    assert "bessel_j0" in str(caught.value)


def test_data_dependence_and_training_are_refused():
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(TraceError, match=r"torch\.where"):
        hidet_dist.from_torch(Branch().eval(), torch.zeros(3))
    with pytest.raises(TraceError, match="eval"):
        hidet_dist.from_torch(nn.Dropout(0.5), torch.zeros(3))


class HalfByte(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(4, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.scales.to(x.dtype)


def test_quantized_weights_are_refused_by_name():
    with pytest.raises(TraceError, match=r"'scales' is of the dtype float8_e4m3fn.* float16, bfloat16, int64"):
        hidet_dist.from_torch(HalfByte().eval(), torch.zeros(4, 4))
    with pytest.raises(TraceError, match="The input input is of the dtype complex64"):
        hidet_dist.from_torch(nn.Identity().eval(), {"input": torch.zeros(4, dtype=torch.complex64)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # quantization is deprecated in PyTorch
        packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear}, torch.qint8)
    with pytest.raises(TraceError, match=r"^0 is a torch\.ao\.nn\.quantized\.dynamic\S*Linear; quantized modules"):
        hidet_dist.from_torch(packed.eval(), torch.zeros(4, 4))


@pytest.mark.parametrize("masked", ["causal", "bool", "grouped"])
def test_attention_is_what_pytorch_computes(masked: str):
    torch.manual_seed(0)

    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if masked == "bool":
                return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=masked == "grouped")

    heads = 2 if masked == "grouped" else 4
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, heads, 5, 8), torch.randn(2, heads, 5, 8)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[0, 3:] = False
    mask[1] = False  # no key at all: the result is 0
    inputs = (q, k, v, mask)
    got = sharded(Attention(), inputs, compiled=masked == "bool")
    np.testing.assert_allclose(got, Attention()(*inputs).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_attention_with_dropout_or_two_masks_is_refused(masked: bool):
    class Attention(nn.Module):
        def forward(self, q: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            if masked:
                return functional.scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
            return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1)

    with pytest.raises(TraceError, match="mask" if masked else "dropout"):
        hidet_dist.from_torch(Attention().eval(), (torch.randn(2, 4, 5, 8), torch.ones(5, 5, dtype=torch.bool)))


@pytest.mark.slow
def test_differences_of_neighbours_are_what_pytorch_computes():
    torch.manual_seed(0)

    class Differences(nn.Module):
        def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
            edges = torch.diff(ids, dim=1, prepend=ids[:, :1], append=ids[:, :2])
            return torch.diff(x), torch.diff(x, n=2, dim=0), edges, torch.diff(x > 0)

    inputs = (torch.randn(4, 6), torch.randint(0, 9, (4, 6)))
    for got, want in zip(sharded(Differences(), inputs), Differences()(*inputs), strict=True):
        np.testing.assert_allclose(got, want.numpy(), rtol=1e-6)


def test_dropout_that_is_off_is_not_random_and_nothing_is_printed_of_a_failure(capfd: pytest.CaptureFixture[str]):
    class Positions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + nn.functional.dropout(torch.arange(4.0).cos(), 0.5, training=False)

    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    graph = hidet_dist.from_torch(Positions().eval(), torch.zeros(3, 4))
    assert [op.name for op in graph.nodes] == ["Add"]
    with pytest.raises(TraceError, match="Control flow"):
        hidet_dist.from_torch(Branch().eval(), torch.zeros(3))
    assert capfd.readouterr() == ("", "")


def test_a_weight_that_no_process_can_address_is_refused():
    module = torch.nn.Linear(2**20, 2**31, bias=False, device="meta").eval()
    with pytest.raises(TraceError, match=r"shape \[2147483648, 1048576\] has 9007199254740992 bytes"):
        hidet_dist.from_torch(module, torch.empty(1, 2**20, device="meta"))
