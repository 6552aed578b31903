"""What a serving process holds: its part of the program, loaded from artifacts, ready to be called."""

from __future__ import annotations

import _ctypes
import ctypes
import importlib.metadata
import importlib.util
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from hidet_dist.artifacts.manifest import Manifest, StageManifest, TensorSignature
from hidet_dist.errors import ArtifactError, ConfigError, HidetDistError, InputError
from hidet_dist.runtime import native, openblas, session
from hidet_dist.runtime.threads import wait_without_spinning
from hidet_dist.spec.symbols import bind
from hidet_dist.weights import SafetensorsFiles

_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register
_sizes_lock = threading.Lock()  # hidet's runtime has one table of symbolic dims' sizes
_KERNEL = "hidet_launch_0"  # the name under which a kernel library exports its only candidate


class LoadedPartition:
    """One rank's part of a program. Call it with the rank's shards of the graph inputs.

    All ranks must call theirs in the same order. Calls from several threads run one after the other, as do those of all
    partitions with symbolic dims in a process: hidet's runtime has one table of their sizes.

    Parameters
    ----------
    folder: Path
        The artifact folder.
    rank: int, optional
        The rank that this process must be; the session's or the environment's by default.
    timeout_seconds: float, optional
        How long a collective waits for the other ranks; the session's by default.
    """

    def __init__(self, folder: Path, rank: int | None, timeout_seconds: float | None):
        manifest = Manifest.load(folder)
        if manifest.abi_version != native.ABI_VERSION:
            raise ArtifactError(
                f"{folder} was built for the native interface {manifest.abi_version}; this is {native.ABI_VERSION}. "
                "Build the artifacts again."
            )
        installed = importlib.metadata.version("hidet")
        if manifest.hidet_version != installed:
            raise ArtifactError(
                f"{folder} was built with hidet {manifest.hidet_version}, not {installed}. Build the artifacts again."
            )
        if manifest.target != "cpu":
            raise ArtifactError(
                f"{folder} was built for {manifest.target} ({manifest.arch}), which cannot be served yet. Build the "
                "artifacts with optimization_config['target'] = 'cpu' to serve them on CPUs."
            )
        (stage,) = manifest.stages
        if rank is not None and not 0 <= rank < stage.size:
            raise ConfigError(f"{folder} has the ranks 0 to {stage.size - 1}; there is no rank {rank}.")
        _enter_session(rank, stage.size, timeout_seconds, folder)
        settings = session.current()
        self.rank = settings.rank if settings is not None else (rank or 0)
        self.world_size = stage.size
        self.manifest = manifest
        self.stage = stage
        manifest.verify(folder, stage.files_of(self.rank))
        self._lock = threading.Lock()
        self._data = _load_data(folder, stage, self.rank)
        self._load_libraries(folder)
        self._communicator = session.communicator_for(stage.mesh_shape, rank, timeout_seconds)
        self._closed = False

    def _load_libraries(self, folder: Path) -> None:
        wait_without_spinning()
        native.library()
        self._runtime = _hidet_runtime()
        for name in self.stage.libraries:
            if name != openblas.NAME:
                raise ArtifactError(f"{folder} needs the unknown library {name!r}. Build the artifacts again.")
            openblas.load_openblas()
        opened: list[tuple[int, ctypes.CDLL]] = []
        self._unload = weakref.finalize(self, _unload, opened)
        self._unload.atexit = False
        table = []
        for number in range(len(self.stage.kernels)):
            file = os.open(folder / self.stage.kernel_file(number), os.O_RDONLY | os.O_CLOEXEC)
            table.append(ctypes.cast(getattr(_load(file, opened), _KERNEL), ctypes.c_void_p).value)
        self._table = (ctypes.c_void_p * max(1, len(table)))(*table)
        # The launcher keeps its weights and workspace in globals, so each partition has a copy of its own.
        file = os.memfd_create("hidet_dist_launcher")
        with os.fdopen(file, "wb", closefd=False) as copy:
            copy.write((folder / self.stage.launcher_file).read_bytes())
        launcher = _load(file, opened)
        pointers = [self._data[name].ctypes.data for name in self.stage.data]
        launcher.hidet_init(ctypes.c_int32(len(pointers)), (ctypes.c_void_p * max(1, len(pointers)))(*pointers))
        self._launcher = launcher
        self._launch = launcher.hidet_launch
        self._launch.restype = None
        self._workspace = _aligned(0)
        if not self.stage.symbols:
            self._reserve_workspace()
        self._check_runtime()

    def _reserve_workspace(self) -> None:
        """Room for the activations; with symbolic dims, for those of the present sizes."""
        sizes = (ctypes.c_int64 * 3)()  # host, CUDA and HIP memory
        self._launcher.hidet_get_workspace_size(sizes)
        if self._workspace.nbytes < max(1, sizes[0]):
            self._workspace = _aligned(max(1, sizes[0]))
            self._launcher.hidet_set_workspace(ctypes.c_int32(0), ctypes.c_void_p(self._workspace.ctypes.data))

    def _agree_on(self, sizes: Mapping[str, int]) -> None:
        """Refuse sizes that another rank does not have: a collective would not end well."""
        if self.world_size == 1 or not self.stage.communications:
            return
        own = np.array([sizes[symbol.name] for symbol in self.stage.symbols], np.int32)
        everyone = np.empty((self.world_size, own.size), np.int32)
        whole_mesh = (1 << len(self.stage.mesh_shape)) - 1
        native.all_gather(
            own.ctypes.data, everyone.ctypes.data, own.size, native.dtype_code(own.dtype.name), whole_mesh
        )
        self._communicator.check()
        for rank, others in enumerate(everyone):
            for symbol, size, other in zip(self.stage.symbols, own, others, strict=True):
                if size != other:
                    raise InputError(
                        f"The symbolic dim {symbol.name} must be the same on all ranks; it is {size} on rank "
                        f"{self.rank} but {other} on rank {rank}."
                    )

    def _set_sizes(self, sizes: Mapping[str, int]) -> None:
        """Tell hidet's runtime the sizes of symbolic dims, which kernels ask it for."""
        for name, size in sizes.items():
            self._runtime.set_symbol_value(name.encode(), ctypes.c_int32(size))

    def _output_shape(self, number: int, signature: TensorSignature) -> tuple[int, ...]:
        if not signature.is_symbolic:
            return tuple(int(extent) for extent in signature.shape)
        dims = (ctypes.c_int32 * len(signature.shape))()
        self._launcher.hidet_get_output_shape(ctypes.c_int32(number), dims)
        if min(dims) < 1:
            written = _text(signature.shape)
            raise InputError(f"The inputs are too small: output {number}, {written}, would be {list(dims)}.")
        return tuple(dims)

    def __call__(self, *inputs: Any) -> Any:
        """Run once. Takes and returns the rank's shards; a single output is returned bare, several as a list.

        Inputs are NumPy arrays, torch tensors or hidet tensors on the CPU; outputs are of the first input's kind.

        Raises
        ------
        InputError
            When the inputs' number, dtypes or shapes are not the program's, a symbolic dim's size is not a multiple of
            what was declared, or two inputs or two ranks disagree on it. No data has been sent then.
        CommunicationError
            When a collective fails; the partition cannot be used any more.
        """
        outputs = self.run(inputs)
        kind = _kind(inputs[0]) if inputs else "numpy"
        converted = [_convert(y, kind) for y in outputs]
        return converted[0] if len(converted) == 1 else converted

    def run(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """As calling, but always with a list of NumPy arrays as the result."""
        arguments = self._arguments(inputs)
        written = [signature.shape for signature in self.stage.inputs]
        shapes = zip(written, (array.shape for array in arguments), strict=True)
        sizes = bind(self.stage.symbols, self.stage.local_symbols, shapes)
        with self._lock, _sizes_lock if sizes else nullcontext():
            if self._closed:
                raise HidetDistError("The partition is closed; load it again.")
            self._communicator.check()
            self._communicator.bind()
            if sizes:
                self._agree_on(sizes)
                self._set_sizes(sizes)
            outputs = [
                np.empty(self._output_shape(number, signature), _numpy_dtype(signature))
                for number, signature in enumerate(self.stage.outputs)
            ]
            if sizes:
                self._reserve_workspace()
            pointers = [ctypes.c_void_p(array.ctypes.data) for array in (*arguments, *outputs)]
            self._launch(*pointers, self._table)
            self._communicator.check()
            self._check_runtime()
        return outputs

    def _arguments(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        if len(inputs) != len(self.stage.inputs):
            raise InputError(f"The program takes {len(self.stage.inputs)} inputs; {len(inputs)} were given.")
        arguments = []
        for number, (x, signature) in enumerate(zip(inputs, self.stage.inputs, strict=True)):
            array = _as_numpy(x, number)
            if array.dtype != _numpy_dtype(signature):
                raise InputError(f"Input {number} must be {signature.dtype}; got {array.dtype}.")
            if not _fits(array.shape, signature):
                whole = (
                    "" if signature.shape == signature.whole_shape else f", a shard of {_text(signature.whole_shape)}"
                )
                raise InputError(
                    f"Input {number} must have the shape {_text(signature.shape)}{whole}; got {_text(array.shape)}."
                )
            arguments.append(np.ascontiguousarray(array))
        return arguments

    def _check_runtime(self) -> None:
        message = self._runtime.hidet_get_last_error()
        if message is not None:
            raise HidetDistError(f"hidet's runtime reports: {message.decode(errors='replace')}")

    def close(self) -> None:
        """Leave the other ranks and free the weights. Closing twice does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                native.bind(None)
                self._communicator.close()
                self._unload()
                self._data.clear()

    def __enter__(self) -> LoadedPartition:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def load_partition(
    out_dir: str | Path, rank: int | None = None, timeout_seconds: float | None = None
) -> LoadedPartition:
    """Load one rank's part of a program from artifacts, and meet the other ranks.

    Parameters
    ----------
    out_dir: str or Path
        The folder that ``auto_parallel`` wrote.
    rank: int, optional
        The rank to load; RANK of the environment (as torchrun sets it) by default.
    timeout_seconds: float, optional
        How long to wait for the other ranks, now and in each collective; 60 s unless ``init`` said otherwise.

    Raises
    ------
    ArtifactError
        When the artifacts are missing, incomplete, altered, or of another version.
    ConfigError
        When the rank or the world size is not the artifacts'.
    RendezvousError
        When the other ranks do not come; it names them.
    """
    return LoadedPartition(Path(out_dir), rank, timeout_seconds)


def _enter_session(rank: int | None, size: int, timeout_seconds: float | None, folder: Path) -> None:
    """Take the place among the ranks that the arguments or the environment give; refuse one that does not fit."""
    if session.current() is None:
        timeout = session.DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds
        if rank is not None and "RANK" not in os.environ:
            session.init(rank=rank, world_size=size, timeout_seconds=timeout)
        else:
            session.init(timeout_seconds=timeout)
    settings = session.current()
    assert settings is not None
    if settings.world_size != size:
        raise ConfigError(
            f"{folder} was built for {size} ranks, but the world size is {settings.world_size}: launch it with "
            f"`python -m hidet_dist.launch -n {size}` or torchrun."
        )


def _hidet_runtime() -> ctypes.CDLL:
    """hidet's runtime library, which kernels need; found without importing hidet, whose compiler is not needed here."""
    found = importlib.util.find_spec("hidet")
    if found is None or not found.submodule_search_locations:
        raise HidetDistError("hidet is not installed; install hidet==0.6.1.")
    path = Path(found.submodule_search_locations[0]) / "lib" / "libhidet_runtime.so"
    runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    runtime.hidet_get_last_error.restype = ctypes.c_char_p
    return runtime


def _load(file: int, opened: list[tuple[int, ctypes.CDLL]]) -> ctypes.CDLL:
    """Load a library by its open file, which stays open as long as the library is loaded.

    The loader takes two libraries of the same path for one, even when the file has been replaced in between: a process
    that loads artifacts, builds them anew and loads them again would run the old kernels.
    """
    try:
        library = ctypes.CDLL(f"/proc/self/fd/{file}")
    except OSError:
        os.close(file)
        raise
    opened.append((file, library))
    return library


def _unload(opened: list[tuple[int, ctypes.CDLL]]) -> None:
    while opened:
        file, library = opened.pop()
        _ctypes.dlclose(library._handle)
        os.close(file)


def _aligned(nbytes: int) -> np.ndarray:
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT
    return buffer[offset : offset + nbytes]


def _load_data(folder: Path, stage: StageManifest, rank: int) -> dict[str, np.ndarray]:
    """The rank's weight shards and coordinate and the shared constants, as bytes in aligned memory."""
    data = {}
    for name in (stage.weights_file(rank), *([stage.constants_file] if stage.constants else [])):
        for key, tensor in SafetensorsFiles.open(folder / name).tensors.items():
            data[key] = _aligned(tensor.nbytes)
            tensor.read_bytes(data[key].data)
    missing = [name for name in stage.data if name not in data]
    if missing:
        raise ArtifactError(
            f"{folder / stage.weights_file(rank)} lacks {', '.join(missing)}. Build the artifacts again."
        )
    return data


def _fits(shape: Sequence[int], signature: TensorSignature) -> bool:
    """Whether a shape is the signature's, its symbolic dims being of any size."""
    return len(shape) == len(signature.shape) and all(
        isinstance(extent, str) or size == extent for size, extent in zip(shape, signature.shape, strict=True)
    )


def _text(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _numpy_dtype(signature: TensorSignature) -> np.dtype:
    try:
        return np.dtype("bool" if signature.dtype in ("bool", "boolean") else signature.dtype)
    except TypeError as error:
        raise InputError(f"The program's dtype {signature.dtype} has no NumPy form; cast it in the graph.") from error


def _kind(x: Any) -> str:
    return "numpy" if isinstance(x, np.ndarray) else type(x).__module__.partition(".")[0]


def _as_numpy(x: Any, number: int) -> np.ndarray:
    if isinstance(x, np.ndarray):
        return x
    if _kind(x) == "torch":
        x = x.detach()
    try:
        return np.from_dlpack(x)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"Input {number} is a {type(x).__name__} that NumPy cannot read ({error}). Give a NumPy array, a torch or "
            "a hidet tensor on the CPU."
        ) from error


def _convert(y: np.ndarray, kind: str) -> Any:
    if kind == "torch":
        import torch

        return torch.from_numpy(y)
    if kind == "hidet":
        import hidet

        return hidet.graph.from_numpy(y)
    return y
