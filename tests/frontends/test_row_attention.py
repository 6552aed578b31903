"""Attention over rows: PyTorch's operator against a loop over tokens, and its graphs, whole and in parts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import hidet_dist
from hidet_dist.errors import UnsupportedModelError
from hidet_dist.normalize import normalize
from hidet_dist.partitioning import CommunicationOp
from hidet_dist.rules.rule import RuleTable
from hidet_dist.soundness.plans import check_stage, evaluate_graph, random_stage
from hidet_dist.spec import DeviceMesh
from hidet_dist.view import GraphView

TOKENS, HEADS, GROUPS, SIZE_K, SIZE_V = 6, 4, 2, 6, 4


@dataclass(frozen=True)
class Case:
    """Options of attention, and the number of parts of the pools; 0 for pools without that dim."""

    options: dict[str, Any]
    parts: int = 0
    sinks: bool = False


CASES = {
    "plain": Case({}),
    "pages and a window": Case({"page": 3, "window": 4}),
    "capped, with sinks": Case({"page": 2, "softcap": 1.5}, sinks=True),
    "values in keys": Case({"value_size": SIZE_V}),
    "parts": Case({"page": 2}, 2),
    "parts, with all": Case({"page": 3, "window": 5, "softcap": 2.0}, 4, True),
}


def inputs_of(case: Case, dtype: torch.dtype = torch.float32, pool: torch.dtype = torch.float32) -> dict[str, Any]:
    """Tokens of three sequences, one of which sees nothing; pages lie anywhere, and those behind the end nowhere."""
    torch.manual_seed(0)
    page, parts = case.options.get("page", 1), max(case.parts, 1)
    columns = math.ceil(12 / page / parts)
    pages = torch.stack([torch.randperm(3 * columns) for _ in range(parts)])  # of each part
    table = pages.reshape(parts, 3, columns).transpose(0, 1)
    sequences = torch.tensor([2, 0, 1, 1, 1, 0])
    lengths = torch.tensor([0, 1, 7, 8, 9, 12])
    for sequence, length in enumerate((12, 9, 0)):
        for number in range(math.ceil(length / page), parts * columns):
            table[sequence, number % parts, number // parts] = -1
    lead = [case.parts] if case.parts else []
    sizes = [SIZE_K] if case.options.get("value_size") else [SIZE_K, SIZE_V]
    pools = [torch.randn(*lead, 3 * columns * page, GROUPS, size).to(pool) for size in sizes]
    return {
        "query": torch.randn(TOKENS, HEADS, SIZE_K).to(dtype),
        "keys": pools[0],
        "values": pools[1] if len(pools) > 1 else None,
        "table": table if case.parts else table[:, 0],
        "sequences": sequences,
        "lengths": lengths,
        **({"sinks": torch.randn(HEADS)} if case.sinks else {}),
    }


def by_token(case: Case, x: dict[str, Any], scale: float) -> torch.Tensor:
    """The definition, token by token and head by head, in double precision."""
    page, window = case.options.get("page", 1), case.options.get("window", 0)
    softcap, size_v = case.options.get("softcap", 0.0), case.options.get("value_size", 0)
    result = torch.zeros(TOKENS, HEADS, SIZE_V, dtype=torch.float64)
    for t in range(TOKENS):
        length = int(x["lengths"][t])
        places = range(max(length - window, 0) if window else 0, length)
        for h in range(HEADS if length else 0):
            keys, values = [], []
            for place in places:
                number, table = place // page, x["table"][x["sequences"][t]]
                at: Any = int(table[number]) * page + place % page if not case.parts else None
                if case.parts:
                    part = number % case.parts
                    at = part, int(table[part, number // case.parts]) * page + place % page
                keys.append(x["keys"][at][h // (HEADS // GROUPS)].double())
                values.append(keys[-1][:size_v] if size_v else x["values"][at][h // (HEADS // GROUPS)].double())
            scores = torch.stack(keys) @ x["query"][t, h].double() * scale
            scores = softcap * torch.tanh(scores / softcap) if softcap else scores
            if case.sinks:
                scores = torch.cat([scores, x["sinks"][h : h + 1].double()])
            result[t, h] = torch.softmax(scores, 0)[: len(values)] @ torch.stack(values)
    return result


class Layer(torch.nn.Module):
    def __init__(self, options: dict[str, Any]):
        super().__init__()
        self.options = options

    def forward(self, query, keys, values, table, sequences, lengths, sinks=None):
        return hidet_dist.attention_over_rows(
            query, keys, values, table, sequences, lengths, 0.4, sinks=sinks, **self.options
        )


@pytest.mark.parametrize("name", CASES)
def test_pytorchs_operator_computes_the_definition(name):
    case = CASES[name]
    x = inputs_of(case)
    y = Layer(case.options)(**x)
    assert y.dtype == torch.float32
    np.testing.assert_allclose(y.numpy(), by_token(case, x, 0.4).numpy(), rtol=1e-5, atol=1e-5)
    assert (y[0] == 0).all()


@pytest.mark.parametrize("name", ["pages and a window", "values in keys", "parts, with all"])
def test_random_plans_compute_the_definition(name):
    case = CASES[name]
    x = inputs_of(case)
    graph = normalize(hidet_dist.from_torch(Layer(case.options).eval(), x))
    arrays = [v.double().numpy() if v.is_floating_point() else v.numpy() for v in x.values() if v is not None]
    (whole,) = evaluate_graph(graph, arrays)
    np.testing.assert_allclose(whole, by_token(case, x, 0.4).numpy(), rtol=1e-6, atol=1e-7)
    rng = np.random.default_rng(0)
    for shape in ((2,), (2, 2)):
        mesh = DeviceMesh(shape)
        table = RuleTable(mesh)
        for _ in range(3):
            stage = random_stage(GraphView(graph), mesh, table, rng)
            assert check_stage(graph, stage, arrays, [whole], table) == ""


def test_pools_stay_split_by_groups_or_by_parts():
    """A device has room for half of each pool: heads are split with their groups, and rows with their parts."""
    for parts, groups in ((0, 2), (2, 1)):
        case = Case({"page": 2}, parts)
        shape = [*[parts] * bool(parts), 4096, groups, 8]
        x = {**inputs_of(case), "keys": torch.zeros(shape), "values": torch.zeros(shape)}
        x["query"] = torch.zeros(TOKENS, HEADS, 8)
        graph = hidet_dist.from_torch(Layer(case.options).eval(), x)
        spec = "(S0, R, R, R)" if parts else "(R, S0, R)"
        options = {
            "mem_budget": x["keys"].nbytes + 40_000,
            "input_specs": [None, spec, spec, None, None, None],
        }
        plan = hidet_dist.make_plan(graph, {"mesh_shape": [2]}, options)
        program = hidet_dist.partition(graph, plan)
        sent = [op.inputs[0] for op in program.graph.nodes if isinstance(op, CommunicationOp)]
        assert sent and not {*program.graph.inputs[1:3]} & {*sent}


def test_what_does_not_fit_is_refused():
    x = inputs_of(CASES["plain"])
    for changed, options, reason in (
        ({"values": x["values"].double()}, {}, "float64"),
        ({}, {"page": 5}, "pages of 5 rows"),
        ({"values": None}, {}, "needs values"),
        ({}, {"window": -1}, "window"),
    ):
        with pytest.raises((UnsupportedModelError, hidet_dist.errors.TraceError), match=reason):
            hidet_dist.from_torch(Layer(options).eval(), {**x, **changed})
