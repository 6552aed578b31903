"""Lowerings of pooling, resampling and im2col."""

from __future__ import annotations

from typing import Any

from hidet.graph import Tensor

from hidet_dist import operators
from hidet_dist.frontends.pytorch.calls import Call, lower_plainly, lowers
from hidet_dist.operators import reductions
from hidet_dist.operators.resampling import upsample_antialiased
from hidet_dist.operators.sampling import MODES, PADDINGS
from hidet_dist.spec.extents import extents_of, same_extent, same_shape


def _rank(call: Call) -> int:
    """Return the number of an operator's spatial dims, from its name, such as ``aten.max_pool2d.default``."""
    return int(call.name.split("d.")[0].split("d_")[0][-1])


@lowers("max_pool1d.default", "max_pool2d.default", "max_pool3d.default")
def _max_pool(call: Call, x: Tensor, kernel_size: Any, stride: Any = (), *args: Any, **options: Any) -> Tensor:
    return operators.max_pool(x, _rank(call), kernel_size, _given(stride), *args, **options)


def _given(stride: Any) -> Any:
    """Return a stride; None for an empty one, which stands for the size of the window."""
    return stride if isinstance(stride, int) or (stride is not None and len(stride)) else None


@lowers("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def _max_pool_with_indices(call: Call, x: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
    return _max_pool(call, x, *args, **options), None


@lowers("avg_pool1d.default", "avg_pool2d.default", "avg_pool3d.default")
def _avg_pool(call: Call, x: Tensor, kernel_size: Any, stride: Any = (), *args: Any, **options: Any) -> Tensor:
    return operators.avg_pool(x, _rank(call), kernel_size, _given(stride), *args, **options)


@lowers(
    "adaptive_avg_pool1d.default",
    "adaptive_avg_pool2d.default",
    "_adaptive_avg_pool2d.default",
    "adaptive_avg_pool3d.default",
    "_adaptive_avg_pool3d.default",
)
def _adaptive_avg_pool(call: Call, x: Tensor, output_size: Any) -> Tensor:
    rank = _rank(call)
    size = call.shape[-rank:]
    if all(isinstance(extent, int) and extent == 1 for extent in size):
        return reductions.mean(x, range(len(x.shape) - rank, len(x.shape)), True)
    return operators.adaptive_avg_pool(x, size)


@lowers("adaptive_max_pool1d.default", "adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(call: Call, x: Tensor, output_size: Any) -> tuple[Tensor, None]:
    return operators.adaptive_max_pool(x, call.shape[-_rank(call) :]), None


@lowers("upsample_nearest1d.vec", "upsample_nearest2d.vec", "upsample_nearest1d.default", "upsample_nearest2d.default")
def _nearest(call: Call, x: Tensor, *args: Any, **_: Any) -> Tensor:
    return _resized(call, x, "nearest", False, _scales(call, args))


@lowers("_upsample_nearest_exact2d.vec", "_upsample_nearest_exact2d.default")
def _nearest_exact(call: Call, x: Tensor, *args: Any, **_: Any) -> Tensor:
    return _resized(call, x, "nearest-exact", False, _scales(call, args))


@lowers("upsample_linear1d.vec", "upsample_bilinear2d.vec", "upsample_linear1d.default", "upsample_bilinear2d.default")
def _linear(call: Call, x: Tensor, size: Any, align_corners: bool, *args: Any, **_: Any) -> Tensor:
    mode = "bilinear" if "bilinear" in call.name else "linear"
    return _resized(call, x, mode, align_corners, _scales(call, (size, *args)))


@lowers("upsample_bicubic2d.vec", "upsample_bicubic2d.default")
def _bicubic(call: Call, x: Tensor, size: Any, align_corners: bool, *args: Any, **_: Any) -> Tensor:
    return _resized(call, x, "bicubic", align_corners, _scales(call, (size, *args)))


@lowers(
    *(f"_upsample_bilinear2d_aa.{kind}" for kind in ("vec", "default")),
    *(f"_upsample_bicubic2d_aa.{kind}" for kind in ("vec", "default")),
)
def _antialiased(call: Call, x: Tensor, size: Any, align_corners: bool, *args: Any, **_: Any) -> Tensor:
    scales = _scales(call, (size, *args))
    return upsample_antialiased(x, call.shape[2:], align_corners, scales, cubic="bicubic" in call.name)


@lowers("grid_sampler_2d.default", "grid_sampler_3d.default", "grid_sampler.default")
def _grid_sample(
    call: Call, x: Tensor, grid: Tensor, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> Tensor:
    return operators.grid_sample(x, grid, MODES[interpolation_mode], PADDINGS[padding_mode], align_corners)


def _scales(call: Call, args: Any) -> list[float] | None:
    """Return the factors among the arguments; None if they follow from the sizes."""
    rank = len(call.shape) - 2
    if call.name.endswith(".vec"):
        factors = args[1] if len(args) > 1 else None
        return None if factors is None else [float(factor) for factor in factors]
    factors = args[1 : 1 + rank]
    return [float(factor) for factor in factors] if len(factors) == rank and None not in factors else None


def _resized(call: Call, x: Tensor, mode: str, align_corners: bool, scales: list[float] | None) -> Tensor:
    """Resample the spatial dims of ``x`` to the sizes of the result; return ``x`` itself if that changes nothing."""
    sizes, output_sizes = extents_of(x)[2:], call.shape[2:]
    factors: list[float | None] = [None] * len(output_sizes) if scales is None else [*scales]
    # A factor such as 1.1 may leave the size of a dim as it is. PyTorch's linear kernels, and its kernel for the
    # nearest elements of two dims, then copy the dim; other kernels resample it by the factor. The latter kernel also
    # doubles a dim exactly, whatever the factor is.
    exact = [1] if "linear" in mode else [1, 2] if mode == "nearest" and len(output_sizes) == 2 else []
    factors = [
        None if any(same_extent(output_size, times * size) for times in exact) else factor
        for output_size, size, factor in zip(output_sizes, sizes, factors, strict=True)
    ]
    if same_shape(sizes, tuple(output_sizes)) and not any(factors):
        return x
    return operators.interpolate(x, output_sizes, mode, align_corners, factors)


lower_plainly(
    {
        "unfold.default": operators.unfold,
        "im2col.default": operators.im2col,
    }
)
