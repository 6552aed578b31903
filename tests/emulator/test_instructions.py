"""Instructions of a GPU, emulated on the CPU in short kernels; behaviour that a GPU does not define is reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.emulator.emulated import EmulatedFault, Emulator, run

Launch = Callable[..., Sequence[np.ndarray]]


@dataclass(frozen=True)
class Kernel:
    """A kernel with its parameters and body, and the blocks, threads and bytes of shared memory of its launch."""

    parameters: str
    body: str
    blocks: int = 1
    threads: int = 32
    shared: int = 0
    opt_in: int = 0


LOAD_ADDRESS = """
static __device__ uint32_t shared_address(const void *pointer) {
  uint32_t to;
  asm ("{.reg.u64 wide; cvta.to.shared.u64 wide, %1; cvt.u32.u64 %0, wide;}" : "=r"(to) : "l"(pointer));
  return to;
}
"""


def source_of(kernels: Iterable[Kernel]) -> str:
    """CUDA C++ of kernels; ``hidet_launch_<n>`` launches the n-th."""
    text = f"""
#include <stdint.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include <hidet_dist/kernels/cuda/runtime.h>
{LOAD_ADDRESS}
"""
    for number, kernel in enumerate(kernels):
        names = ", ".join(each.split()[-1].lstrip("*") for each in kernel.parameters.split(","))
        opt_in = f"cudaFuncAttributeMaxDynamicSharedMemorySize, {kernel.opt_in}"
        attribute = f"cudaFuncSetAttribute(k{number}, {opt_in});" if kernel.opt_in else ""
        grid = f"dim3({kernel.blocks}, 1, 1), dim3({kernel.threads}, 1, 1), {kernel.shared}"
        text += f"""
static __global__ void __launch_bounds__({kernel.threads}) k{number}({kernel.parameters}) {{ {kernel.body} }}
DLL void hidet_launch_{number}({kernel.parameters}) {{
  try {{
    {attribute}
    k{number}<<<{grid}, (cudaStream_t)get_cuda_stream()>>>({names});
    {{cudaError_t err = cudaGetLastError(); if (err != cudaSuccess) LOG(ERROR) << cudaGetErrorString(err) << "\\n";}}
  }} catch (HidetException &e) {{ hidet_set_last_error(e.what()); }}
}}
"""
    return text


@pytest.fixture(scope="module")
def launch(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Run one of :data:`KERNELS`, which are compiled together: the headers take longer than they do."""
    source = tmp_path_factory.mktemp("kernels") / "source.cu"
    source.write_text(source_of(KERNELS.values()))
    library = emulator.compile(source, source.with_name("library.so"))
    number = {name: n for n, name in enumerate(KERNELS)}
    return lambda name, *arrays, **more: run(library, *arrays, candidate=number[name], **more)


PRODUCT = """
  __shared__ __align__(16) {half} sa[16 * 16], sb[16 * 8];
  for (int i = threadIdx.x; i < 256; i += 32) sa[i] = a[i];
  for (int i = threadIdx.x; i < 128; i += 32) sb[i] = b[i];
  __syncthreads();
  uint32_t ra[4], rb[2];
  float c[4] = {{1.0f, 1.0f, 1.0f, 1.0f}};
  int lane = threadIdx.x;
  asm volatile ("ldmatrix.sync.aligned.m8n8.x4.b16 {{%0, %1, %2, %3}}, [%4];"
      : "=r"(ra[0]), "=r"(ra[1]), "=r"(ra[2]), "=r"(ra[3]) : "l"(sa + lane % 16 * 16 + lane / 16 * 8));
  asm volatile ("ldmatrix.sync.aligned.m8n8.x2.trans.b16 {{%0, %1}}, [%2];"
      : "=r"(rb[0]), "=r"(rb[1]) : "l"(sb + lane % 16 * 8));
  asm ("mma.sync.aligned.m16n8k16.row.col.f32.{type}.{type}.f32 {{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, "
       "{{%0, %1, %2, %3}};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(ra[0]), "r"(ra[1]), "r"(ra[2]), "r"(ra[3]), "r"(rb[0]), "r"(rb[1]));
  for (int i = 0; i < 4; ++i) y[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = c[i];
"""


def test_matrices_are_loaded_and_multiplied(launch: Launch) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float16) for shape in ((16, 16), (16, 8)))
    *_, y = launch("a product", a, b, np.zeros((16, 8), np.float32))
    np.testing.assert_array_equal(y, a.astype(np.float32) @ b.astype(np.float32) + 1)


def test_bfloat16_is_multiplied(launch: Launch) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 8, shape).astype(np.float32) for shape in ((16, 16), (16, 8)))
    high = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in (a, b)]
    *_, y = launch("a product of bfloat16", *high, np.zeros((16, 8), np.float32))
    np.testing.assert_array_equal(y, a @ b + 1)


SHUFFLES = """
  int lane = threadIdx.x;
  float x = (float)lane;
  y[lane] = __shfl_down_sync(0xffffffff, x, 8, 32);
  y[32 + lane] = __shfl_xor_sync(0xffffffff, x, 1);
  y[64 + lane] = __shfl_sync(0xffffffff, x, 3, 16);
  y[96 + lane] = __shfl_up_sync(0xffffffff, x, 2);
  if (lane < 24) {
    uint32_t mask = __activemask();
    y[128 + lane] = __shfl_sync(mask, (float)(mask & 0xffffff), 0);
  }
"""


def test_threads_of_a_warp_exchange_values(launch: Launch) -> None:
    (y,) = launch("shuffles", np.zeros((5, 32), np.float32))
    lanes = np.arange(32)
    np.testing.assert_array_equal(y[0], np.where(lanes < 24, lanes + 8, lanes))
    np.testing.assert_array_equal(y[1], lanes ^ 1)
    np.testing.assert_array_equal(y[2], lanes // 16 * 16 + 3)
    np.testing.assert_array_equal(y[3], np.where(lanes >= 2, lanes - 2, lanes))
    np.testing.assert_array_equal(y[4], np.where(lanes < 24, 0xFFFFFF, 0))


COPY = """
  extern __shared__ uint8_t shared[];
  float *own = (float *)shared + 4 * threadIdx.x;
  asm volatile ("cp.async.cg.shared.global [%0], [%1], %2, %3;"
      : : "r"(shared_address(own)), "l"(x + 4 * threadIdx.x), "n"(16), "r"(threadIdx.x == 5 ? 8 : 16));
  asm volatile ("cp.async.commit_group;" : :);
  {wait}
  for (int i = 0; i < 4; ++i) y[4 * threadIdx.x + i] = own[i];
"""
WAIT = 'asm volatile ("cp.async.wait_group 0;" : :);'


@pytest.mark.parametrize("when", ["late", "eager"])
def test_copies_are_there_once_they_were_waited_for(launch: Launch, when: str) -> None:
    x = np.arange(128, dtype=np.float32)
    _, y = launch("a copy", x, np.zeros_like(x), environment={"EMULATED_COPIES": when})
    expected = x.copy()
    expected[22:24] = 0
    np.testing.assert_array_equal(y, expected)


def test_copies_need_not_be_there_before(launch: Launch) -> None:
    x = np.arange(128, dtype=np.float32)
    with pytest.raises(EmulatedFault, match=r"before the cp\.async to it was waited for"):
        launch("a copy that is not waited for", x, np.zeros_like(x))


BARRIER = """
  __shared__ int sums[4];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = threadIdx.x;
  __syncthreads();
  y[blockIdx.x * 128 + threadIdx.x] = sums[0] + sums[1] + sums[2] + sums[3];
"""


def test_warps_wait_for_each_other_at_a_barrier(launch: Launch) -> None:
    for order in ("forward", "reverse"):
        (y,) = launch("a barrier of a block", np.zeros(384, np.int32), environment={"EMULATED_WARPS": order})
        np.testing.assert_array_equal(y, 192)


ATOMIC = """
  __shared__ float s[1];
  if (threadIdx.x == 0) s[0] = 0.0f;
  __syncthreads();
  atomicAdd(s, 1.0f);
  __syncthreads();
  y[threadIdx.x] = s[0];
"""


def test_threads_add_to_shared_memory_in_one_piece(launch: Launch) -> None:
    (y,) = launch("sums in shared memory", np.zeros(96, np.float32))
    np.testing.assert_array_equal(y, 96)


EXCHANGE = """
  __shared__ int s[64];
  for (int i = 0; i < 3; ++i) {
    s[threadIdx.x] = threadIdx.x + i;
    __syncwarp();
    y[64 * i + threadIdx.x] = s[threadIdx.x ^ 1];
    __syncwarp();
  }
  __syncthreads();
  y[192 + threadIdx.x] = s[63 - threadIdx.x];
"""


def test_warps_exchange_values_by_shared_memory(launch: Launch) -> None:
    (y,) = launch("exchanges in shared memory", np.zeros((4, 64), np.int32))
    threads = np.arange(64)
    np.testing.assert_array_equal(y[:3], [(threads ^ 1) + i for i in range(3)])
    np.testing.assert_array_equal(y[3], 65 - threads)


FAULTS = {
    "waits for ever": ("if (threadIdx.x % 32 == 0) __syncwarp(); else __syncthreads();", "waits for ever"),
    "the warp diverges": (
        "if (threadIdx.x % 32 < 16) __shfl_sync(0xffffffff, 1, 0); else __shfl_xor_sync(0xffffffff, 1, 1);",
        "the warp diverges",
    ),
    "a mask without the thread": ("__shfl_sync(1, 1, 0);", "leaves out"),
    "a misaligned vector": (
        'uint32_t a, b; asm volatile ("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(a), "=r"(b) : "l"(y + 1)); y[0] = a;',
        "an access of 8 bytes is misaligned",
    ),
    "memory beyond the end": ("y[64 + threadIdx.x] = 1;", "there is no memory"),
    "memory far beyond the end": ("y[threadIdx.x + (1 << 24)] = 1;", "there is no memory"),
    "memory before the begin": ("y[(int)threadIdx.x - 4096] = 1;", "there is no memory"),
    "shared memory beyond its end": (
        "extern __shared__ uint8_t shared[]; ((int *)shared)[threadIdx.x] = 1;",
        "shared memory is accessed beyond its end",
    ),
    "shared memory read beyond its end": (
        "extern __shared__ uint8_t shared[]; y[threadIdx.x] = shared[threadIdx.x + 1];",
        r"thread \(63, 0, 0\): shared memory is accessed beyond its end",
    ),
    "read before others wrote it": (
        "__shared__ int s[32]; if (threadIdx.x < 32) s[threadIdx.x] = 1; else y[threadIdx.x] = s[threadIdx.x - 32];",
        r"a race: byte .* is read, and was written by thread \(0, 0, 0\)",
    ),
    "written before others read it": (
        "__shared__ int s[32]; if (threadIdx.x < 32) y[threadIdx.x] = s[threadIdx.x]; else s[threadIdx.x - 32] = 1;",
        r"a race: byte .* is written, and was read by thread",
    ),
    "written by two": (
        "extern __shared__ uint8_t shared[]; ((int *)shared)[threadIdx.x % 16] = 1;",
        r"a race: byte .* of shared memory is written, and was written by thread \(0, 0, 0\)",
    ),
    "no barrier in the warp": (
        "__shared__ int s[64]; s[threadIdx.x] = 1; __shfl_xor_sync(0xffffffff, 1, 1);"
        " y[threadIdx.x] = s[threadIdx.x ^ 1];",
        "a race",
    ),
    "a barrier in the warp for what another warp wrote": (
        "__shared__ int s[64]; s[threadIdx.x] = 1; __syncwarp(); y[threadIdx.x] = s[63 - threadIdx.x];",
        "a race",
    ),
    "read while others change it in one piece": (
        "__shared__ float s[1]; if (threadIdx.x == 0) s[0] = 0.0f; __syncthreads();"
        " atomicAdd(s, 1.0f); y[threadIdx.x] = s[0];",
        "a race",
    ),
    "a copy to what others read": (
        "extern __shared__ uint8_t shared[]; int *s = (int *)shared; s[threadIdx.x % 16] = 1; __syncthreads();"
        " y[threadIdx.x] = s[threadIdx.x % 16]; if (threadIdx.x == 63) "
        'asm volatile ("cp.async.cg.shared.global [%0], [%1], %2;" : : "r"(shared_address(s)), "l"(y), "n"(16));',
        "a race",
    ),
    "a false assumption": ("__builtin_assume(threadIdx.x < 8);", "a false assumption"),
}


KERNELS = {
    "a product": Kernel("half *a, half *b, float *y", PRODUCT.format(half="half", type="f16")),
    "a product of bfloat16": Kernel(
        "__nv_bfloat16 *a, __nv_bfloat16 *b, float *y", PRODUCT.format(half="__nv_bfloat16", type="bf16")
    ),
    "shuffles": Kernel("float *y", SHUFFLES),
    "a copy": Kernel("const float *x, float *y", COPY.format(wait=WAIT), shared=512),
    "a copy that is not waited for": Kernel("const float *x, float *y", COPY.format(wait=""), shared=512),
    "a barrier of a block": Kernel("int *y", BARRIER, blocks=3, threads=128),
    "sums in shared memory": Kernel("float *y", ATOMIC, threads=96),
    "exchanges in shared memory": Kernel("int *y", EXCHANGE, threads=64),
    "much shared memory": Kernel("int *y", "y[0] = 1;", shared=65536),
    "much shared memory, asked for": Kernel("int *y", "y[0] = 1;", shared=65536, opt_in=65536),
    "more shared memory than there is": Kernel("int *y", "y[0] = 1;", shared=65536, opt_in=300000),
    **{name: Kernel("int *y", body, threads=64, shared=64) for name, (body, _) in FAULTS.items()},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_reports_what_a_gpu_would_not_do(launch: Launch, fault: str) -> None:
    with pytest.raises(EmulatedFault, match=FAULTS[fault][1]):
        launch(fault, np.zeros(64, np.int32))


def test_shared_memory_is_had_only_when_asked_for(launch: Launch) -> None:
    for name in ("much shared memory", "more shared memory than there is"):
        with pytest.raises(EmulatedFault, match=r"the launch failed: .*invalid argument"):
            launch(name, np.zeros(1, np.int32))
    assert launch("much shared memory, asked for", np.zeros(1, np.int32))[0] == 1


def test_an_unknown_instruction_does_not_compile(emulator: Emulator, tmp_path: Path) -> None:
    source = tmp_path / "source.cu"
    source.write_text(source_of([Kernel("int *y", 'asm volatile ("bar.warp.everything %0;" : : "r"(1));')]))
    with pytest.raises(AssertionError, match="bar_warp_everything"):
        emulator.compile(source, tmp_path / "library.so")
