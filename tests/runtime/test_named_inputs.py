"""Inputs with names: in errors, and in calls that measure; integers of another size for token ids."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import hidet
import numpy as np
import pytest

import hidet_dist
from hidet_dist.errors import InputError
from hidet_dist.runtime.partition import LoadedPartition
from hidet_dist.spec.interface import Interface, attach

TABLE = np.arange(8 * 4, dtype=np.float32).reshape(8, 4)


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ids = hidet.symbol([2, 3], "int64", "cpu")
    graph = hidet.trace_from(hidet.ops.take(hidet.asarray(TABLE), ids, 0), [ids])
    attach(graph, Interface((("input_ids", {"tensor": 0}),), ("input_ids",), ("rows",), {"tensor": 0}))
    folder: Path = tmp_path_factory.mktemp("named") / "artifacts"
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {}, folder)
    return folder


@pytest.fixture
def model(artifacts: Path) -> Iterator[LoadedPartition]:
    with hidet_dist.load_partition(artifacts, rank=0) as loaded:
        yield loaded


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        (np.zeros((2, 3), "float32"), "The input 'input_ids' must be int64; got float32."),
        (np.zeros((2, 2), "int32"), "The input 'input_ids' must have the shape [2, 3]; got [2, 2]."),
        (np.full((2, 3), 9), "The input 'input_ids' is 9 at [0, 0]"),
        (np.zeros((2, 3), "uint64"), "The input 'input_ids' must be int64; got uint64."),
    ],
)
def test_errors_name_the_argument(model: LoadedPartition, ids: np.ndarray, says: str) -> None:
    with pytest.raises(InputError, match=re.escape(says)):
        model(input_ids=ids)


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint16"])
def test_integers_of_fewer_bits_stand_for_token_ids(model: LoadedPartition, dtype: str) -> None:
    ids = np.array([[1, 2, 3], [7, 0, 5]], dtype)
    for given in (ids, np.asfortranarray(ids), np.repeat(ids, 2, axis=1)[:, ::2]):
        np.testing.assert_array_equal(model(input_ids=given), TABLE[ids])


def test_a_profile_takes_arguments_by_name(model: LoadedPartition) -> None:
    ids = np.zeros((2, 3), "int64")
    names = [operator.name for operator in model.profile(input_ids=ids).operators]
    assert names == [operator.name for operator in model.profile(ids).operators] != []
