"""Products by cuBLAS in serving processes, on stand-ins: chosen where faster, left out where they cannot run."""

from __future__ import annotations

import ctypes
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from stand_in_artifacts import as_cuda, compile_against, serve

import hidet_dist  # noqa: F401  (adds its calls to hidet.distributed)
from hidet_dist import native
from hidet_dist.artifacts.manifest import Manifest
from hidet_dist.errors import CompileError
from hidet_dist.runtime.cuda.cublas import LIBRARY_VARIABLE, WORKSPACE_BYTES
from hidet_dist.runtime.cuda.cudart import load_runtime
from hidet_dist.runtime.libraries import hidet_runtime
from hidet_dist.toolchain.cuda import find_toolkit

X = np.arange(32, dtype=np.float32).reshape(4, 8)
W = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
SHARED = {"FAKE_CUDA_DEVICES": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
OWN_SECONDS = 0.04  # of the candidate that calls nobody

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def build(stand_ins: Path, folder: Path, ranks: int) -> Path:
    """x w on each rank, its kernel replaced by the stand-in."""
    x = hidet.symbol([4, 8], "float32", "cpu")
    graph = hidet.trace_from(hidet.ops.matmul(x, hidet.asarray(W)), [x])
    hidet.distributed.auto_parallel(
        graph, {"mesh_shape": [ranks]}, {"pins": {"op:0": "(R, R), (R, R) -> (R, R)", "w0": "(R, R)"}}, folder
    )
    (stage,) = Manifest.load(folder).program().stages
    assert len(stage.kernels) == 1
    compile_against(stand_ins, "stand_in_product.cpp", folder / stage.kernel_file(0))
    return as_cuda(folder, candidates=(2,), cublas=(True,))


@pytest.fixture(scope="module")
def built(stand_ins: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(stand_ins, tmp_path_factory.mktemp("artifacts") / "product", 1)


@pytest.fixture
def program(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "artifacts"))


def choice(program: Path) -> dict[str, Any]:
    (file,) = (program / "choices").iterdir()
    body: dict[str, Any] = json.loads(file.read_text())
    return body


def check_answers(stand_ins: Path, program: Path, **more: str) -> None:
    (found,) = serve(stand_ins, "answers", program, **more)
    assert not isinstance(found, str), found
    for y in found:
        np.testing.assert_allclose(np.float32(y), X @ W, rtol=1e-5, atol=1e-5)


def kernel_seconds(stand_ins: Path, program: Path, **more: str) -> float:
    (found,) = serve(stand_ins, "profile", program, **more)
    assert not isinstance(found, str), found
    return float(found[1])


@pytest.mark.parametrize("as_graph", [False, True])
def test_it_is_chosen_where_it_is_faster(stand_ins: Path, program: Path, as_graph: bool) -> None:
    as_cuda(program, cuda_graph=as_graph)
    check_answers(stand_ins, program)
    assert {key: choice(program)[key] for key in ("chosen", "usable", "cublas")} == {
        "chosen": [1],
        "usable": [2],
        "cublas": 130100,
    }
    assert kernel_seconds(stand_ins, program) < OWN_SECONDS


def test_it_is_not_chosen_where_it_is_slower(stand_ins: Path, program: Path) -> None:
    check_answers(stand_ins, program, FAKE_CUBLAS_SECONDS="0.08")
    assert choice(program)["chosen"] == [0]


def test_without_it_the_others_run(stand_ins: Path, program: Path, tmp_path: Path) -> None:
    """Whether there is none, or it is none; also where it was chosen before."""
    check_answers(stand_ins, program)
    missing = {LIBRARY_VARIABLE: str(tmp_path / "libcublas.so.13")}
    other = {LIBRARY_VARIABLE: str(stand_ins / "libcuda.so.1")}
    for without in (missing, other, {"FAKE_CUBLAS_VERSION": "100200"}, {"FAKE_CUBLAS_FAIL": "create"}):
        check_answers(stand_ins, program, **without)
    assert kernel_seconds(stand_ins, program, **missing) >= OWN_SECONDS
    assert choice(program)["chosen"] == [1]


def test_a_candidate_that_fails_is_left_out(stand_ins: Path, program: Path) -> None:
    check_answers(stand_ins, program, FAKE_CUBLAS_FAIL="product")
    body = choice(program)
    assert body["chosen"] == [0]
    assert body["seconds"]["0"][1] is None


def test_another_version_is_another_choice(stand_ins: Path, program: Path) -> None:
    check_answers(stand_ins, program)
    check_answers(stand_ins, program, FAKE_CUBLAS_VERSION="130200")
    versions = {json.loads(file.read_text())["cublas"] for file in (program / "choices").iterdir()}
    assert versions == {130100, 130200}


def test_a_product_that_fails_later_is_an_error_that_says_why(stand_ins: Path, program: Path) -> None:
    check_answers(stand_ins, program)
    (error,) = serve(stand_ins, "answers", program, FAKE_CUBLAS_FAIL="product")
    assert "cublasGemmStridedBatchedEx failed: the GPU program failed to execute" in error


def test_a_kernel_with_nothing_else_is_refused(stand_ins: Path, program: Path, tmp_path: Path) -> None:
    as_cuda(program, candidates=(1,), cublas=(True,))
    path = tmp_path / "libcublas.so.13"
    (error,) = serve(stand_ins, "answers", program, **{LIBRARY_VARIABLE: str(path)})
    assert "None of the 1 candidates of kernel 0" in error
    assert f"{LIBRARY_VARIABLE} is '{path}', which is not a file" in error


def test_its_workspace_counts(stand_ins: Path, program: Path) -> None:
    """cuBLAS is loaded if kernels use it, and only then."""
    ((with_it, _),) = serve(stand_ins, "memory", program)
    for without in ({"FAKE_CUBLAS_FAIL": "create"}, {"FAKE_CUBLAS_FAIL": "product"}):
        shutil.rmtree(program / "choices")
        ((held, _),) = serve(stand_ins, "memory", program, **without)
        assert WORKSPACE_BYTES <= with_it - held <= WORKSPACE_BYTES + 2 * X.nbytes  # staged to choose
        (program / "choices").mkdir(exist_ok=True)


def test_either_all_ranks_run_a_candidate_or_none(stand_ins: Path, tmp_path: Path) -> None:
    folder = build(stand_ins, tmp_path / "artifacts", 2)
    for versions, wanted in ((("130100", "130200"), 0), (("130100", "130100"), 1)):
        each = [{"FAKE_CUBLAS_VERSION": version} for version in versions]
        for seconds, _ in serve(stand_ins, "timed", folder, 2, each, **SHARED):
            assert (max(seconds.values()) < OWN_SECONDS) == bool(wanted)
    # One rank on which it fails is enough.
    shutil.rmtree(folder / "choices", ignore_errors=True)
    for found in serve(stand_ins, "timed", folder, 2, [{}, {"FAKE_CUBLAS_FAIL": "product"}], **SHARED):
        assert not isinstance(found, str), found
    assert choice(folder)["chosen"] == [0]


@pytest.fixture
def handle(stand_ins: Path) -> Iterator[Callable[[], str | None]]:
    """A handle that this thread's kernels use. It waits for them when it is called, and says what went wrong.

    It is the test's own: a thread has one, and a test that destroys it leaves none to the next.
    """
    runtime = hidet_runtime()
    native.load_cublas(str(stand_ins / "libcublas.so.13"))
    workspace = ctypes.create_string_buffer(1024)
    default_stream = native.StreamFunction(lambda: None)  # hidet's, once it is imported, is PyTorch's
    stream, report = (
        ctypes.cast(function, ctypes.c_void_p).value or 0 for function in (default_stream, runtime.hidet_set_last_error)
    )
    own = native.CublasHandle(stream, report, lambda _: None, ctypes.addressof(workspace), len(workspace))
    cuda = ctypes.CDLL(str(stand_ins / "libcuda.so.1"))

    def wait() -> str | None:
        cuda.cuStreamSynchronize(None)
        message = runtime.hidet_get_last_error()
        return None if message is None else bytes(message).decode()

    own.bind()
    yield wait
    own.destroy()


def pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("dtype", "batch", "apart"), [("float32", 1, (0, 0)), ("float16", 3, (8, 0)), ("float32", 3, (8, 12))]
)
def test_products_are_row_by_row(
    handle: Callable[[], str | None], dtype: str, batch: int, apart: tuple[int, int], transposed: bool
) -> None:
    """[2, 4] by [4, 3], of which there may be one or several."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 10, (batch, 12)).astype(dtype) for _ in range(2))
    c = np.zeros((batch, 2, 3), dtype)
    ints = [ctypes.c_int64(each) for each in (batch, 2, 3, 4)]
    native.library().hidet_dist_cublas_product(
        native.dtype_code(dtype),
        0,
        *ints,
        pointer(a),
        ctypes.c_int64(apart[0]),
        pointer(b),
        ctypes.c_int64(apart[1]),
        int(transposed),
        pointer(c),
    )
    assert handle() is None
    for number in range(batch):
        own_a, own_b = (x.ravel()[number * step :] for x, step in zip((a, b), apart, strict=True))
        right = own_b[:12].reshape(3, 4).T if transposed else own_b[:12].reshape(4, 3)
        np.testing.assert_array_equal(c[number], own_a[:8].reshape(2, 4) @ right)


def test_a_product_that_cublas_does_not_take_is_reported(handle: Callable[[], str | None]) -> None:
    x = np.zeros(1, np.float32)
    for dtype, rows in ((native.dtype_code("int32"), 1), (native.dtype_code("float32"), 2**31)):
        one, zero = ctypes.c_int64(1), ctypes.c_int64(0)
        native.library().hidet_dist_cublas_product(
            dtype, 0, one, ctypes.c_int64(rows), one, one, pointer(x), zero, pointer(x), zero, 0, pointer(x)
        )
        assert "cuBLAS" in (handle() or "")


@pytest.mark.slow
def test_a_program_built_for_a_gpu_computes_the_product(handle: Callable[[], str | None], tmp_path: Path) -> None:
    """Of a candidate of cuBLAS's, all code is the host's."""
    try:
        find_toolkit()
    except CompileError as error:
        pytest.skip(str(error))
    rng = np.random.default_rng(0)
    w = rng.integers(-2, 3, (40, 64)).astype(np.float16)
    x = hidet.symbol([2, 3, 8, 40], "float16", "cpu")
    graph = hidet.trace_from(hidet.ops.matmul(x, hidet.asarray(w)), [x])
    config = {"target": "cuda", "arch": "sm_90", "cuda": {"cublas": True}}
    hidet.distributed.auto_parallel(graph, {"mesh_shape": [1]}, config, tmp_path / "out")
    (stage,) = Manifest.load(tmp_path / "out").program().stages
    number = stage.cublas.index(True)  # beside it, only what renames memory
    assert stage.candidates[number] == 2
    for name in stage.libraries:
        load_runtime(name)
    kernel = ctypes.CDLL(str(tmp_path / "out" / stage.kernel_file(number)))
    a = rng.integers(-2, 3, (2, 3, 8, 40)).astype(np.float16)
    c = np.full((2, 3, 8, 64), np.nan, np.float16)
    kernel.hidet_launch_1(pointer(a), pointer(w), pointer(c))
    assert handle() is None
    np.testing.assert_array_equal(c, a @ w)


def test_scratch_memory_moves_only_when_it_grows(handle: Callable[[], str | None]) -> None:
    """Graphs have its address."""
    blocks: list[ctypes.Array[ctypes.c_char]] = []

    def allocate(nbytes: int) -> int | None:
        if nbytes > 4096:
            return None
        blocks.append(ctypes.create_string_buffer(nbytes))
        return ctypes.addressof(blocks[-1])

    library = native.library()
    library.hidet_dist_cublas_scratch.restype = ctypes.c_void_p
    nothing = native.StreamFunction(lambda: None)
    function = ctypes.cast(nothing, ctypes.c_void_p).value or 0
    own = native.CublasHandle(function, function, allocate, function, 1)
    own.bind()
    found = [library.hidet_dist_cublas_scratch(ctypes.c_int64(nbytes)) for nbytes in (100, 50, 100, 150, 200, 8000, 10)]
    own.destroy()
    assert library.hidet_dist_cublas_scratch(ctypes.c_int64(10)) is None  # with no handle
    first, second = map(ctypes.addressof, blocks)
    assert found == [first] * 3 + [second] * 2 + [None, second]
    assert [len(block) for block in blocks] == [100, 200]
