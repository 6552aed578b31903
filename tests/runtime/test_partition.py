"""Partitions as callers use them: tensors of three libraries, the caller's outputs, threads, warm-up, closing."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import hidet_dist
from hidet_dist.errors import ArtifactError, HidetDistError, InputError
from hidet_dist.runtime.partition import LoadedPartition
from hidet_dist.runtime.tensors import buffer_of

SERVE = Path(__file__).with_name("serve_partition.py")
RNG = np.random.default_rng(0)
W = RNG.standard_normal((8, 6)).astype(np.float32)
X = RNG.standard_normal((4, 8)).astype(np.float32)


@pytest.fixture(autouse=True)
def no_launcher(no_launch_variables: None) -> None:
    """One rank, in this process."""


def build(outputs: Any, inputs: Any, out: Path, ranks: int = 1, **config: Any) -> Path:
    hidet.distributed.auto_parallel(hidet.trace_from(outputs, inputs), {"mesh_shape": [ranks]}, config, out)
    return out


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x @ w, and x + 1"""
    x = hidet.symbol([4, 8], "float32", "cpu")
    out = tmp_path_factory.mktemp("artifacts") / "linear"
    return build([hidet.ops.matmul(x, hidet.asarray(W)), x + 1.0], [x], out)


@pytest.fixture
def model(linear: Path) -> Iterator[LoadedPartition]:
    with hidet.distributed.load_partition(linear, 0) as model:
        yield model


@pytest.fixture(scope="module")
def halves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x * 2 in bfloat16, of x in float32"""
    x = hidet.symbol([4, 8], "float32", "cpu")
    return build((x * 2.0).to("bfloat16"), [x], tmp_path_factory.mktemp("artifacts") / "halves")


@pytest.fixture(scope="module")
def bfloat16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    x = hidet.symbol([4, 8], "bfloat16", "cpu")
    return build(x + x, [x], tmp_path_factory.mktemp("artifacts") / "bfloat16")


@pytest.fixture(scope="module")
def symbolic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """relu(x[batch, 8] @ w); the batch is planned as 4, and even"""
    x = hidet.symbol(["batch", 8], "float32", "cpu")
    out = tmp_path_factory.mktemp("artifacts") / "symbolic"
    symbols = {"batch": {"expected": 4, "multiple_of": 2}}
    return build(hidet.ops.relu(hidet.ops.matmul(x, hidet.asarray(W))), [x], out, symbols=symbols)


class Foreign:
    """A tensor of another library: all it has is DLPack."""

    def __init__(self, array: Any):
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


class Unversioned(Foreign):
    """The same, from before DLPack had versions."""

    def __dlpack__(self, stream: Any = None) -> Any:
        return self.array.__dlpack__()


def misaligned(array: np.ndarray) -> np.ndarray:
    memory = np.empty(array.nbytes + 1, np.uint8)
    result = np.ndarray(array.shape, array.dtype, memory.data, 1)
    result[...] = array
    return result


@pytest.mark.parametrize(
    "lay_out",
    [
        lambda x: x,
        np.asfortranarray,
        lambda x: np.repeat(x, 2, axis=0)[::2],
        lambda x: x[::-1, ::-1].copy()[::-1, ::-1],
        misaligned,
        lambda x: np.ascontiguousarray(x.T).T,
        torch.from_numpy,
        lambda x: torch.from_numpy(x.T.copy()).T,
        lambda x: torch.from_numpy(np.repeat(x, 3, axis=1))[:, ::3],
        lambda x: torch.from_numpy(x).clone().requires_grad_(),
        hidet.asarray,
        Foreign,
        lambda x: Foreign(np.asfortranarray(x)),
        Unversioned,
    ],
)
def test_inputs_are_read_however_they_lie(model: LoadedPartition, lay_out: Any) -> None:
    x = lay_out(X)
    product, more = model(x)
    kind = type(x) if isinstance(x, torch.Tensor | hidet.Tensor) else np.ndarray
    assert isinstance(product, kind)
    assert isinstance(more, kind)
    np.testing.assert_allclose(product.numpy() if kind is not np.ndarray else product, X @ W, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(more.numpy() if kind is not np.ndarray else more, X + 1)


def test_row_major_inputs_are_not_copied() -> None:
    tensor, image = torch.from_numpy(X), hidet.asarray(X)
    for x, address in (
        (X, X.ctypes.data),
        (tensor, tensor.data_ptr()),
        (tensor[1:3], tensor[1:3].data_ptr()),
        (tensor[:, :1].T, tensor.data_ptr()),  # no row has a next one
        (image, image.storage.addr),
        (Foreign(X[2:]), X[2:].ctypes.data),
    ):
        buffer = buffer_of(x, "Input 0")
        assert buffer.address == address
        assert buffer.packed().address == address or isinstance(x, torch.Tensor)
    strided = buffer_of(tensor[:, 1:], "Input 0")
    assert not strided.contiguous
    assert strided.packed().address != strided.address


def test_exported_tensors_are_given_back(model: LoadedPartition) -> None:
    """hidet keeps a tensor that it exported until its new owner says that it is done."""
    from hidet.graph.impl.dlpack import DLManagedTensorContext

    x = hidet.asarray(X)
    model(x)
    before = len(DLManagedTensorContext.allocated)
    for _ in range(3):
        model(x)
    assert len(DLManagedTensorContext.allocated) == before


def without_storage(nbytes: int) -> torch.Tensor:
    """A tensor of 4 by 8 float32, 128 bytes, whose storage was made smaller than that."""
    x = torch.ones(4, 8)
    x.untyped_storage().resize_(nbytes)
    return x


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(4, 8)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (fake, "Input 0 is a FakeTensor without memory"),
        (lambda: torch.ones(4, 8, device="meta"), "Input 0 is a Tensor that cannot be read"),
        (lambda: without_storage(0), "Input 0 needs 128 bytes of its storage, which has only 0"),
        (lambda: without_storage(64), "Input 0 needs 128 bytes of its storage, which has only 64"),
        (lambda: hidet.symbol([4, 8], "float32", "cpu"), "Input 0 is a Tensor that cannot be read"),
        (lambda: torch.ones(4, 8).to_sparse(), "Input 0 is a Tensor that cannot be read"),
        (lambda: torch.ones(4, 8, dtype=torch.complex64).conj(), "conjugate view.*give x.resolve_conj"),
    ],
)
def test_tensors_whose_numbers_are_nowhere_are_refused(
    model: LoadedPartition, x: Callable[[], Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        model(x())
    with pytest.raises(InputError, match=message.replace("Input 0", "Output 1")):
        model.run([X], [np.empty((4, 6), np.float32), x()])
    np.testing.assert_allclose(model(X)[1], X + 1)


def test_negative_views_have_their_sign(model: LoadedPartition) -> None:
    values = torch.complex(torch.zeros(4, 8), torch.from_numpy(X)).conj()
    assert values.imag.is_neg()
    for view in (
        values.imag,
        torch._neg_view(torch.from_numpy(X)),
        torch._neg_view(torch.from_numpy(X[:1])).expand(4, 8),
    ):
        np.testing.assert_allclose(model(view)[1].numpy(), view.numpy(force=True) + 1)
    with pytest.raises(InputError, match=r"Output 1 is a negative view.*give x.resolve_neg"):
        model.run([X], [np.empty((4, 6), np.float32), values.imag])


@pytest.mark.parametrize("rows", [2**31, 2**50 + 1])
def test_the_size_of_an_input_is_checked_before_it_is_copied(symbolic: Path, rows: int) -> None:
    with hidet.distributed.load_partition(symbolic, 0) as model:
        for x in (np.broadcast_to(X[:1], (rows, 8)), torch.from_numpy(X[:1]).expand(rows, 8)):
            with pytest.raises(InputError, match="The symbolic dim batch must be"):
                model(x)


def test_bfloat16_goes_in_and_out(bfloat16: Path) -> None:
    x = torch.randn(4, 8).to(torch.bfloat16)
    with hidet.distributed.load_partition(bfloat16, 0) as model:
        y = model(x)
        assert y.dtype == torch.bfloat16
        assert torch.equal(y, x + x)
        assert torch.equal(model(x.T.contiguous().T), y)
        assert model(hidet.from_torch(x)).dtype == hidet.bfloat16
        with pytest.raises(InputError, match="must be bfloat16; got float32"):
            model(X)


def test_numpy_has_no_bfloat16(halves: Path) -> None:
    importlib.import_module("ml_dtypes")  # which adds one, to the processes that import it
    with hidet.distributed.load_partition(halves, 0) as model:
        with pytest.raises(InputError, match="Output 0 is bfloat16, which numpy lacks"):
            model(X)
        expected = (torch.from_numpy(X) * 2).to(torch.bfloat16)
        assert torch.equal(model(torch.from_numpy(X)), expected)
        y = torch.empty(4, 8, dtype=torch.bfloat16)
        assert model.run([X], [y])[0] is y
        assert torch.equal(y, expected)


@pytest.mark.parametrize(
    "empty",
    [
        lambda shape: np.full(shape, np.nan, np.float32),
        lambda shape: torch.full(shape, torch.nan),
        lambda shape: hidet.full(list(shape), float("nan"), "float32", device="cpu"),
        lambda shape: Foreign(np.full(shape, np.nan, np.float32)),
    ],
)
def test_outputs_are_written_where_the_caller_says(model: LoadedPartition, empty: Any) -> None:
    given = [empty((4, 6)), empty((4, 8))]
    for scale in (1, -3):
        product, more = model.run([X * scale], given)
        assert product is given[0]
        assert more is given[1]
        np.testing.assert_allclose(np.from_dlpack(product), X * scale @ W, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(np.from_dlpack(more), X * scale + 1)


SHARED = np.empty(4 * 8 + 4 * 6, np.float32)
READ_ONLY = np.empty((4, 6), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("first", "says"),
    [
        (None, "has 2 outputs; 1 were given"),
        (np.empty((4, 6)), "Output 0 must be float32; got float64"),
        (np.empty((6, 4), np.float32), r"Output 0 must have the shape \[4, 6\]; got \[6, 4\]"),
        (np.empty((4, 6), np.float32, order="F"), "Output 0 must be contiguous"),
        (misaligned(np.empty((4, 6), np.float32)), "Output 0 must be contiguous"),
        (READ_ONLY, "must be writable; the ndarray is read-only"),
        (Unversioned(np.empty((4, 6), np.float32)), "must be writable; the Unversioned is read-only, or does not say"),
        (torch.empty(4, 6, requires_grad=True), "requires a gradient"),
        (torch.empty(4, 6, device="meta"), "is a Tensor that cannot be read"),
        ("text", "Output 0 is a str"),
        (X.reshape(-1)[:24].reshape(4, 6), "Output 0 shares memory with input 0"),
        (SHARED[8:32].reshape(4, 6), "Output 1 shares memory with output 0"),
    ],
)
def test_outputs_that_do_not_fit_are_refused_unwritten(model: LoadedPartition, first: Any, says: str) -> None:
    SHARED[:] = 7
    before = X.copy()
    given = [SHARED[24:].reshape(4, 8)] if first is None else [first, SHARED[24:].reshape(4, 8)]
    with pytest.raises(InputError, match=says):
        model.run([X], given)
    assert (SHARED == 7).all()
    np.testing.assert_array_equal(X, before)
    model(X)


def test_symbolic_outputs_are_checked_at_their_size(symbolic: Path) -> None:
    with hidet.distributed.load_partition(symbolic, 0) as model:
        for batch in (2, 6, 2):
            x = RNG.standard_normal((batch, 8)).astype(np.float32)
            y = np.empty((batch, 6), np.float32)
            model.run([x], [y])
            np.testing.assert_allclose(y, np.maximum(x @ W, 0), rtol=1e-5, atol=1e-5)
            with pytest.raises(InputError, match=rf"must have the shape \[{batch}, 6\]; got \[8, 6\]"):
                model.run([x], [np.empty((8, 6), np.float32)])


def test_warming_up_takes_no_inputs(model: LoadedPartition, symbolic: Path) -> None:
    model.warm_up()
    with pytest.raises(InputError, match="no symbolic dim batch; it has none"):
        model.warm_up({"batch": 2})
    with hidet.distributed.load_partition(symbolic, 0) as other:
        other.warm_up()
        other.warm_up({"batch": 10})
        with pytest.raises(InputError, match="batch must be a positive multiple of 2"):
            other.warm_up({"batch": 3})
        with pytest.raises(InputError, match="no symbolic dim rows; it has batch"):
            other.warm_up({"rows": 3})
        np.testing.assert_allclose(other(X), np.maximum(X @ W, 0), rtol=1e-5, atol=1e-5)


def test_threads_take_turns(model: LoadedPartition, symbolic: Path) -> None:
    with hidet.distributed.load_partition(symbolic, 0) as other, ThreadPoolExecutor(8) as pool:

        def call(number: int) -> None:
            batch = 2 + 2 * (number % 5)
            x = np.random.default_rng(number).standard_normal((batch, 8)).astype(np.float32)
            np.testing.assert_allclose(other(x), np.maximum(x @ W, 0), rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(model(X * number)[0], X * number @ W, rtol=1e-5, atol=1e-4)

        for done in [pool.submit(call, number) for number in range(200)]:
            done.result(timeout=1000)


def test_closing_waits_for_the_call_that_runs(linear: Path) -> None:
    model = hidet.distributed.load_partition(linear, 0)
    right = []
    begun = threading.Event()

    def call() -> None:
        with pytest.raises(HidetDistError, match="The partition is closed"):
            while True:
                right.append(np.allclose(model(X)[0], X @ W, rtol=1e-5, atol=1e-5))
                begun.set()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(60)
    model.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert all(right)
    model.close()


def test_weights_that_are_changed_in_use_are_refused(linear: Path, tmp_path: Path) -> None:
    for change in ("truncate", "overwrite"):
        copy = Path(shutil.copytree(linear, tmp_path / change))
        with hidet.distributed.load_partition(copy, 0) as model:
            model(X)
            path = copy / "weights/rank0.safetensors"
            with path.open("r+b") as file:
                if change == "truncate":
                    file.truncate(8)
                else:
                    file.seek(-4, 2)
                    file.write(b"\0\0\0\0")
            with pytest.raises(ArtifactError, match=r"rank0\.safetensors was changed while it was in use"):
                model(X)


class Meddler(Foreign):
    """A tensor that does something when it is asked where it lies."""

    def __init__(self, array: Any, do: Callable[[], object]):
        super().__init__(array)
        self.do = do

    def __dlpack__(self, **arguments: Any) -> Any:
        self.do()
        return super().__dlpack__(**arguments)


@pytest.mark.parametrize("change", [lambda path: os.truncate(path, 0), lambda path: path.write_bytes(bytes(512))])
def test_weights_that_are_changed_during_a_call_are_refused(linear: Path, tmp_path: Path, change: Any) -> None:
    """Once the call has found them as they were, so that kernels read beyond the end of the file."""
    copy = Path(shutil.copytree(linear, tmp_path / "copy"))
    path = copy / "weights/rank0.safetensors"
    with hidet.distributed.load_partition(copy, 0) as model:
        for _ in range(2):
            with pytest.raises(ArtifactError, match=r"rank0\.safetensors was changed while it was in use"):
                model.run([X], [Meddler(np.empty((4, 6), np.float32), lambda: change(path)), np.empty_like(X)])
    with hidet.distributed.load_partition(linear, 0) as model:
        np.testing.assert_allclose(model(X)[0], X @ W, rtol=1e-5, atol=1e-5)


def test_artifacts_may_be_replaced_or_removed_while_they_are_in_use(tmp_path: Path) -> None:
    x = hidet.symbol([4, 8], "float32", "cpu")
    out = tmp_path / "out"
    with hidet.distributed.load_partition(build(hidet.ops.matmul(x, hidet.asarray(W)), [x], out), 0) as model:
        build(hidet.ops.matmul(x, hidet.asarray(-W)), [x], out)
        np.testing.assert_allclose(model(X), X @ W, rtol=1e-5, atol=1e-5)
        with hidet.distributed.load_partition(out, 0) as other:
            np.testing.assert_allclose(other(X), X @ -W, rtol=1e-5, atol=1e-5)


def launch(mode: str, *arguments: Any) -> str:
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", "2", "--timeout", "500", str(SERVE), mode]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """x @ w, the rows of w on two ranks."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    out = tmp_path_factory.mktemp("artifacts") / "split"
    return build(hidet.ops.matmul(x, hidet.asarray(W)), [x], out, ranks=2, pins={"w0": "(S0, R)"})


def test_ranks_that_communicate_are_called_from_one_thread(split: Path) -> None:
    assert sorted(launch("threads", split).split()) == ["0:right", "1:right"]


def test_closing_while_another_thread_runs_on_two_ranks(split: Path) -> None:
    assert sorted(launch("close", split).split()) == ["0:closed", "1:closed"]


def test_each_output_is_written_by_each_call(tmp_path: Path) -> None:
    """Outputs that no operator is left to compute: constants, and an input that is permuted and back."""
    x = hidet.symbol([4, 6], "float32", "cpu")
    sevens = [hidet.ops.full([4, 6], 7.0) for _ in range(2)]
    with hidet.option.context():
        hidet.option.execution_mode("symbolic")
        made = hidet.ops.full([4, 6], 3.0)
        there_and_back = hidet.ops.permute_dims(hidet.ops.permute_dims(x, [1, 0]), [1, 0])
        outputs = [x + 1.0, *sevens, made, made + 1.0, hidet.ops.permute_dims(made, [1, 0]), there_and_back, x]
    hidet_dist.auto_parallel(hidet.trace_from(outputs, [x]), {"mesh_shape": [1]}, {}, tmp_path / "out")
    data = np.arange(24, dtype=np.float32).reshape(4, 6)
    with hidet_dist.load_partition(tmp_path / "out", 0) as own:
        for _ in range(2):
            found = own(data.copy())
            constants = [
                np.full(shape, number) for shape, number in (((4, 6), 7), ((4, 6), 7), ((4, 6), 3), ((4, 6), 4))
            ]
            for got, want in zip(found, [data + 1, *constants, np.full((6, 4), 3), data, data], strict=True):
                np.testing.assert_array_equal(got, want)
                got.fill(99)
