"""Python bindings of the CUDA driver: devices, memory, streams, events and graphs. It is loaded when first needed.

Names and numbers are those of the CUDA Driver API reference. All calls act on a device's primary context, which the
CUDA runtime (and with it hidet's kernels, PyTorch and NCCL) uses too.
"""

from __future__ import annotations

import ctypes
import functools
import os
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

from hidet_dist.errors import ConfigError, HidetDistError
from hidet_dist.runtime.cuda.nccl import DRIVER_VARIABLE

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: other threads are not restricted by a capture
_ANY_MEMORY = 4  # CU_MEMORYTYPE_UNIFIED: the driver tells the host's memory from a device's by the address
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_NAME_BYTES = 256
_CONNECTIONS_VARIABLE, _CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS", 8  # the device's queues, by default
_MILLISECONDS = 1e3  # per second

_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (c_uint,),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuDevicePrimaryCtxRelease_v2": (c_int,),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuMemAlloc_v2": (POINTER(c_uint64), c_size_t),
    "cuMemAllocAsync": (POINTER(c_uint64), c_size_t, c_void_p),
    "cuMemFree_v2": (c_uint64,),
    "cuMemAllocHost_v2": (POINTER(c_void_p), c_size_t),
    "cuMemFreeHost": (c_void_p,),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),
    "cuMemcpy2DAsync_v2": (c_void_p, c_void_p),
    "cuMemsetD8Async": (c_uint64, ctypes.c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),
    "cuStreamBeginCapture_v2": (c_void_p, c_int),
    "cuStreamEndCapture": (c_void_p, POINTER(c_void_p)),
    "cuGraphInstantiateWithFlags": (POINTER(c_void_p), c_void_p, ctypes.c_ulonglong),
    "cuGraphLaunch": (c_void_p, c_void_p),
    "cuGraphDestroy": (c_void_p,),
    "cuGraphExecDestroy": (c_void_p,),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventDestroy_v2": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),
    "cuEventSynchronize": (c_void_p,),
    "cuEventElapsedTime": (POINTER(c_float), c_void_p, c_void_p),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
}


class _RowsCopy(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (
        ("srcXInBytes", c_size_t),
        ("srcY", c_size_t),
        ("srcMemoryType", c_int),
        ("srcHost", c_void_p),
        ("srcDevice", c_uint64),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        ("dstXInBytes", c_size_t),
        ("dstY", c_size_t),
        ("dstMemoryType", c_int),
        ("dstHost", c_void_p),
        ("dstDevice", c_uint64),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("WidthInBytes", c_size_t),
        ("Height", c_size_t),
    )


class DeviceError(HidetDistError):
    """A CUDA device refused a request, such as an allocation, or failed."""


class Driver:
    """The functions of the driver that serving needs. Each raises DeviceError where CUDA reports an error.

    Parameters
    ----------
    path: str
        The library, ``libcuda.so.1`` or its path.

    Raises
    ------
    ConfigError
        Where it cannot be loaded, or there is no device.
    """

    def __init__(self, path: str):
        try:
            library = ctypes.CDLL(path)
            self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise ConfigError(f"CUDA devices cannot be used: {error} (is a CUDA driver installed?)") from None
        for name, arguments in _FUNCTIONS.items():
            self._functions[name].argtypes = arguments
            self._functions[name].restype = c_int
        status = self._functions["cuInit"](0)
        if status:
            raise ConfigError(f"CUDA devices cannot be used: {self._text(status)}")

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function of the driver."""
        status = self._functions[name](*arguments)
        if status:
            raise DeviceError(f"{name} failed: {self._text(status)}")

    def _text(self, status: int) -> str:
        text = c_char_p()
        self._functions["cuGetErrorString"](status, byref(text))
        return f"CUDA error {status}" + (f", {text.value.decode(errors='replace')}" if text.value else "")

    @property
    def record_event(self) -> int:
        """The address of ``cuEventRecord``, for native code."""
        return ctypes.cast(self._functions["cuEventRecord"], c_void_p).value or 0

    def device_count(self) -> int:
        """Return the number of devices."""
        count = c_int()
        self.call("cuDeviceGetCount", byref(count))
        return count.value

    def device_name(self, device: int) -> str:
        """Return a device's name, such as ``NVIDIA H100 80GB HBM3``."""
        name = ctypes.create_string_buffer(_NAME_BYTES)
        self.call("cuDeviceGetName", name, _NAME_BYTES, device)
        return name.value.decode(errors="replace")

    def capability(self, device: int) -> tuple[int, int]:
        """Return a device's compute capability, major and minor."""
        values = []
        for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR):
            value = c_int()
            self.call("cuDeviceGetAttribute", byref(value), attribute, device)
            values.append(value.value)
        return values[0], values[1]

    def retain_context(self, device: int) -> int:
        """Retain and return a device's primary context; release it by :meth:`release_context`."""
        return self._handle("cuDevicePrimaryCtxRetain", device)

    def release_context(self, device: int) -> None:
        """Release a device's primary context."""
        self.call("cuDevicePrimaryCtxRelease_v2", device)

    def current_context(self) -> int:
        """Return the calling thread's context, or 0."""
        return self._handle("cuCtxGetCurrent")

    def set_context(self, context: int) -> None:
        """Make a context the calling thread's current one."""
        self.call("cuCtxSetCurrent", context or None)

    def allocate(self, nbytes: int) -> int:
        """Allocate device memory, and return its address, a multiple of 256 bytes."""
        address = c_uint64()
        self.call("cuMemAlloc_v2", byref(address), max(1, nbytes))
        return address.value

    def allocate_beside(self, nbytes: int, stream: int) -> int:
        """Allocate device memory without waiting for work on streams other than this idle one; return its address."""
        address = c_uint64()
        self.call("cuMemAllocAsync", byref(address), max(1, nbytes), stream)
        self.synchronize(stream)
        return address.value

    def free(self, address: int) -> None:
        """Free device memory, once no work uses it any more."""
        self.call("cuMemFree_v2", address)

    def allocate_host(self, nbytes: int) -> int:
        """Allocate pinned host memory, and return its address."""
        return self._handle("cuMemAllocHost_v2", nbytes)

    def free_host(self, address: int) -> None:
        """Free pinned host memory."""
        self.call("cuMemFreeHost", address)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two of host and device memory, on a stream."""
        if nbytes:
            self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def copy_rows(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy ``height`` rows of ``width`` bytes between any two of host and device memory, on a stream.

        Pitches are the bytes from the begin of one row to that of the next.
        """
        copy = _RowsCopy(
            srcMemoryType=_ANY_MEMORY,
            srcDevice=source,
            srcPitch=source_pitch,
            dstMemoryType=_ANY_MEMORY,
            dstDevice=target,
            dstPitch=target_pitch,
            WidthInBytes=width,
            Height=height,
        )
        self.call("cuMemcpy2DAsync_v2", byref(copy), stream)

    def clear(self, address: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes of device memory to a value, on a stream."""
        if nbytes:
            self.call("cuMemsetD8Async", address, value, nbytes, stream)

    def new_stream(self, blocking: bool = True) -> int:
        """Create a stream, which is ordered with the legacy default stream if it is ``blocking``."""
        return self._handle("cuStreamCreate", 0 if blocking else _NON_BLOCKING)

    def synchronize(self, stream: int) -> None:
        """Wait for a stream's work. Raises DeviceError if it failed."""
        self.call("cuStreamSynchronize", stream)

    def new_event(self) -> int:
        """Create an event that records a time."""
        return self._handle("cuEventCreate", 0)

    def record(self, event: int, stream: int) -> None:
        """Record an event on a stream: it happens when the stream's work so far is done."""
        self.call("cuEventRecord", event, stream or None)

    def wait_for(self, stream: int, event: int) -> None:
        """Make further work of a stream wait for an event."""
        self.call("cuStreamWaitEvent", stream, event, 0)

    def seconds_between(self, first: int, second: int) -> float:
        """Return the seconds between two events that have happened."""
        milliseconds = c_float()
        self.call("cuEventElapsedTime", byref(milliseconds), first, second)
        return milliseconds.value / _MILLISECONDS

    def begin_capture(self, stream: int) -> None:
        """Begin to capture this thread's work on the stream into a graph, without running it."""
        self.call("cuStreamBeginCapture_v2", stream, _CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """End the capture, and return the graph."""
        return self._handle("cuStreamEndCapture", stream, result_last=True)

    def instantiate(self, graph: int) -> int:
        """Instantiate a graph: return an executable of it."""
        executable = c_void_p()
        self.call("cuGraphInstantiateWithFlags", byref(executable), graph, 0)
        return executable.value or 0

    def _handle(self, name: str, *arguments: Any, result_last: bool = False) -> int:
        handle = c_void_p()
        self.call(name, *((*arguments, byref(handle)) if result_last else (byref(handle), *arguments)))
        return handle.value or 0


@functools.cache
def load() -> Driver:
    """Load the system's driver, or the one that ``HIDET_DIST_CUDA_DRIVER`` names, once per process.

    Raises
    ------
    ConfigError
        Where there is none, or it does not work.
    """
    return Driver(os.environ.get(DRIVER_VARIABLE, "libcuda.so.1"))


def device_of_rank(rank: int) -> int:
    """Return the CUDA device of a rank: torchrun's LOCAL_RANK, or the rank, modulo the number of devices.

    Raises
    ------
    ConfigError
        Where there is no driver or no device.
    """
    devices = load().device_count()
    if devices < 1:
        raise ConfigError("There is no CUDA device.")
    return int(os.environ.get("LOCAL_RANK") or rank) % devices


def check_connections() -> None:
    """Check that the streams of a pipeline do not share queues on the device.

    A message may be pending on one stream until work of another one is done. With few queues, that work may be behind
    the message (CUDA C++ Programming Guide, "CUDA Environment Variables").

    Raises
    ------
    ConfigError
        If CUDA_DEVICE_MAX_CONNECTIONS is less than its default.
    """
    given = os.environ.get(_CONNECTIONS_VARIABLE)
    if given is not None and given.isdecimal() and int(given) < _CONNECTIONS:
        raise ConfigError(
            f"{_CONNECTIONS_VARIABLE} is {given}, but a pipeline needs at least {_CONNECTIONS}: its stages compute and "
            "exchange messages at the same time. Leave it unset."
        )


def check_architecture(arch: str | None, device: int) -> None:
    """Check that a device runs code for ``arch``, such as ``sm_90``.

    Device code runs on devices of the same major capability, and of the same or a higher minor one (CUDA C++
    Programming Guide, "Binary Compatibility").

    Raises
    ------
    ConfigError
        If it does not; the message names the device's architecture.
    """
    driver = load()
    major, minor = driver.capability(device)
    digits = (arch or "").removeprefix("sm_")
    if not digits.isdigit() or int(digits) // 10 != major or int(digits) % 10 > minor:
        raise ConfigError(
            f"The artifacts were built for {arch}, but CUDA device {device} ({driver.device_name(device)}) is "
            f"sm_{major}{minor}. Build them with optimization_config['arch'] = 'sm_{major}{minor}'."
        )
