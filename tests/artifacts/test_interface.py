"""Artifacts of models: they are called as the model is, and give back what it gives back."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import hidet
import numpy as np
import pytest
import torch
from torch import nn

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.errors import InputError, SpecError
from hidet_dist.spec.interface import Interface, NamedParts, Record

A, B = np.array([1.0, -2.0], np.float32), np.array([0.5, 3.0], np.float32)


class Parts(NamedTuple):
    total: torch.Tensor
    values: list[torch.Tensor]
    loss: torch.Tensor | None


class Nested(nn.Module):
    """Arguments and results nested in every way, and an argument whose name the call itself might use."""

    def forward(self, self_: tuple[torch.Tensor, torch.Tensor], number: dict[str, Any], flip: bool = False) -> Any:
        a, b = self_
        if flip:
            a, b = b, a
        return Parts(a + number["scale"], [a - b, a * 2], None), {"mask": a > b}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    a, b = torch.from_numpy(A), torch.from_numpy(B)
    graph = hidet_dist.from_torch(Nested().eval(), ((a, b), {"scale": b}, True))
    out = tmp_path_factory.mktemp("interface") / "nested"
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {}, out)
    return out


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


def test_a_partition_is_called_as_the_model_is(artifacts: Path) -> None:
    with hidet_dist.load_partition(artifacts, 0) as model:
        for result in (
            model((A, B), {"scale": B}, True),
            model(self_=[A, B], number={"scale": B}),
            model((A, B), flip=True, number={"scale": B}),
        ):
            parts, others = result
            assert isinstance(parts, NamedParts)
            np.testing.assert_array_equal(parts.total, B + B)
            np.testing.assert_array_equal(parts.values[0], B - A)
            np.testing.assert_array_equal(parts["values"][1], B * 2)
            assert parts.loss is None
            total, values, loss = parts
            assert total is parts.total
            assert values is parts.values
            assert loss is None
            assert parts[0] is parts.total
            np.testing.assert_array_equal(others["mask"], B > A)
        flat = model.run(model.interface.flatten((A, B), {"scale": B}))
        assert [len(model.interface.input_names), len(flat)] == [3, 4]


def test_records_skip_fields_that_are_none():
    fields = [["total", {"tensor": 0}], ["loss", {"value": None}], ["rest", {"tensor": 1}]]
    own = Interface((), (), ("total", "rest"), {"record": "Output", "fields": fields}).nest([A, B])
    assert isinstance(own, Record)
    assert list(own) == ["total", "rest"]
    assert own.loss is None
    assert own[1] is own["rest"] is own.rest is B


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((A, B, True, 4), {}, "takes 3 arguments; 4"),
        (((A, B),), {}, "'number' is missing"),
        (((A, B),), {"number": {"scale": B}, "other": 1}, "not traced with an argument 'other'"),
        (((A, B),), {"self_": (A, B), "number": {"scale": B}}, "'self_' was given twice"),
        (((A,),), {"number": {"scale": B}}, "'self_' must have the parts 0, 1"),
        (((A, B),), {"number": {"scale": B, "more": B}}, "'number' must have the parts scale"),
        (((A, B),), {"number": {"scale": None}}, "'number.scale' must be a tensor"),
        (((A, B), {"scale": B}, A), {}, "'flip' was True"),
        (((A, B), {"scale": B[:1]}), {}, r"must have the shape \[2\]"),
    ],
)
def test_calls_that_the_model_would_not_take_are_refused(artifacts: Path, args: Any, kwargs: Any, says: str) -> None:
    with hidet_dist.load_partition(artifacts, 0) as model:
        with pytest.raises(InputError, match=says):
            model(*args, **kwargs)
        model((A, B), {"scale": B})  # and the next call is made


def test_artifacts_of_a_bare_graph_take_inputs_by_place(tmp_path: Path) -> None:
    x, z = (hidet.symbol([2], "float32", "cpu") for _ in range(2))
    hidet_dist.auto_parallel(hidet.trace_from([x + z, x - z], [x, z]), {"mesh_shape": [1]}, {}, tmp_path / "out")
    with hidet_dist.load_partition(tmp_path / "out", 0) as model:
        assert model.interface is None
        assert isinstance(model(A, B), list)
        with pytest.raises(InputError, match="have no names; got x"):
            model(x=A)


def test_the_manifest_holds_the_interface_as_it_was(artifacts: Path) -> None:
    (stage,) = Manifest.load(artifacts).program().stages
    assert stage.interface is not None
    assert Interface.from_plain(stage.interface.to_plain()) == stage.interface
    assert stage.interface.input_names == ("self_.0", "self_.1", "number.scale")


X = {"parameters": [["x", {"tensor": 0}]], "input_names": ["x"], "output_names": ["y"], "result": {"tensor": 0}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"more": 1}, "must have parameters, input_names"),
        ({"input_names": "x"}, "input_names of an interface must be a list of texts"),
        ({"output_names": [1]}, "output_names of an interface must be a list of texts"),
        ({"parameters": {}}, "parameters of an interface must be pairs of distinct names"),
        ({"parameters": [["x", {"tensor": 0}], ["x", {"value": 1}]]}, "must be pairs of distinct names"),
        ({"parameters": [["x", {"tensor": 1}]]}, r"each of the 1 tensors of input_names once; got \[1\]"),
        ({"parameters": [["x", {"tensor": True}]]}, r"parameters\['x'\] of an interface is malformed"),
        ({"parameters": [["x", {"tensor": -1}]]}, "malformed"),
        ({"parameters": [["x", {"value": []}]]}, "malformed"),
        ({"parameters": [["x", {"record": 1, "fields": [["a", {"tensor": 0}]]}]]}, "malformed"),
        ({"result": {"list": [{"tensor": 0}, {"tensor": 0}]}}, "each of the 1 tensors of output_names once"),
        ({"result": {"dict": {}}}, "result of an interface is malformed"),
        ({"result": None}, "result of an interface is malformed"),
    ],
)
def test_what_is_no_interface_is_refused(changes: dict[str, Any], says: str) -> None:
    assert Interface.from_plain(X).flatten(x=1) == [1]
    with pytest.raises(SpecError, match=says):
        Interface.from_plain(X | changes)


def test_an_interface_that_is_nested_too_deeply_is_refused() -> None:
    result: dict[str, Any] = {"tensor": 0}
    for _ in range(100):
        result = {"list": [result]}
    with pytest.raises(SpecError, match="nested more than 64 deep"):
        Interface.from_plain(X | {"result": result})
