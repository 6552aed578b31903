"""Padding, moved elements, convolutions, pooling, resampling and normalization beside PyTorch's."""

from __future__ import annotations

import itertools

import hidet
import pytest
import torch
from tests.operators.against_torch import booleans, compare, floats, integers
from torch.nn import functional

from hidet_dist import operators

INNER = (6, 7, 5)
dims_one_to_three = pytest.mark.parametrize("dims", [1, 2, 3])


def test_padding():
    x = floats(2, 3, 4, 5)
    compare(lambda v: operators.pad(v, [1, 2, 0, -1]), lambda v: functional.pad(v, [1, 2, 0, -1]), x)
    for value, own in ((3, integers(0, 9, 3, 4)), (True, booleans(3, 4)), (float("-inf"), x)):
        compare(
            lambda v, n=value: operators.pad(v, [1, 2], value=n),
            lambda v, n=value: functional.pad(v, [1, 2], value=n),
            own,
        )
    for mode in ("reflect", "replicate", "circular"):
        compare(
            lambda v, m=mode: operators.pad(v, [1, 2, 3, 1], m), lambda v, m=mode: functional.pad(v, [1, 2, 3, 1], m), x
        )
    with pytest.raises(ValueError, match="cannot be padded"):
        operators.pad(hidet.symbol([2, 3], "float32", "cpu"), [3, 0], "reflect")


def test_moved_elements():
    x = floats(2, 3, 4, 5)
    compare(lambda v: operators.roll(v, [-1, 7], [1, 3]), lambda v: v.roll([-1, 7], [1, 3]), x)
    compare(lambda v: operators.roll(v, 5), lambda v: v.roll(5), x)
    compare(lambda v: operators.flip(v, [-1, 1]), lambda v: v.flip([-1, 1]), x)
    compare(lambda v: operators.unfold(v, 2, 3, 1), lambda v: v.unfold(2, 3, 1), x)
    compare(
        lambda v: operators.im2col(v, [2, 3], 1, [1, 1], 2), lambda v: functional.unfold(v, [2, 3], 1, [1, 1], 2), x
    )
    compare(lambda v: operators.diagonal(v, 1, -2, -1), lambda v: v.diagonal(1, -2, -1), x)
    for offset in (-2, 0, 1):
        compare(lambda v, d=offset: operators.tril(v, d), lambda v, d=offset: v.tril(d), x)
        compare(lambda v, d=offset: operators.triu(v, d), lambda v, d=offset: v.triu(d), integers(1, 9, 4, 5))
    compare(operators.tril, torch.tril, booleans(4, 4))
    compare(lambda v: operators.repeat_interleave(v, 3, 1), lambda v: v.repeat_interleave(3, 1), x)
    compare(lambda v: operators.repeat_interleave(v, 3), lambda v: v.repeat_interleave(3), x)
    compare(lambda v: operators.repeat(v, [2, 1, 3, 1, 2]), lambda v: v.repeat(2, 1, 3, 1, 2), x)


def test_pixels_and_channels():
    compare(lambda v: operators.pixel_shuffle(v, 2), lambda v: functional.pixel_shuffle(v, 2), floats(2, 8, 3, 5))
    compare(lambda v: operators.pixel_unshuffle(v, 2), lambda v: functional.pixel_unshuffle(v, 2), floats(2, 2, 6, 4))
    compare(lambda v: operators.channel_shuffle(v, 2), lambda v: functional.channel_shuffle(v, 2), floats(2, 8, 3, 5))


@dims_one_to_three
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("stride", "padding", "dilation"), [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_convolutions(dims, groups, stride, padding, dilation):
    plain = getattr(functional, f"conv{dims}d")
    x, weight, bias = floats(2, 4, *INNER[:dims]), floats(6, 4 // groups, *(3, 2, 1)[:dims]), floats(6)
    compare(
        lambda *t: operators.convolution(*t, [stride], [padding], [dilation], groups=groups),
        lambda *t: plain(*t, stride, padding, dilation, groups),
        x, weight, bias, atol=2e-5,
    )  # fmt: skip
    turned = getattr(functional, f"conv_transpose{dims}d")
    weight, extra = floats(4, 6 // groups, *(3, 2, 2)[:dims]), stride - 1
    compare(
        lambda *t: operators.convolution(*t, [stride], [padding], [dilation], True, [extra], groups),
        lambda *t: turned(*t, stride, padding, extra, groups, dilation),
        x, weight, bias, atol=2e-5,
    )  # fmt: skip


@dims_one_to_three
def test_transposed_convolutions_whose_tiles_do_not_overlap(dims):
    turned = getattr(functional, f"conv_transpose{dims}d")
    x, weight = floats(2, 4, *INNER[:dims]), floats(4, 3, *[2] * dims)
    graph = compare(
        lambda a, b: operators.conv_transpose(a, b, 2), lambda a, b: turned(a, b, None, 2), x, weight, atol=2e-5
    )
    assert [op.name for op in graph.nodes if "Conv" in op.name] == []


@dims_one_to_three
def test_pooling(dims):
    x = floats(2, 3, *(7, 6, 5)[:dims])
    largest, mean = getattr(functional, f"max_pool{dims}d"), getattr(functional, f"avg_pool{dims}d")
    for kernel, stride, padding, ceil in ((3, 2, 1, False), (3, 2, 1, True), (2, None, 0, True), (2, 3, 0, True)):
        how = (kernel, stride, padding)
        compare(
            lambda v, a=how, c=ceil: operators.max_pool(v, dims, *a, 1, c),
            lambda v, a=how, c=ceil: largest(v, *a, 1, c),
            x,
        )
        for counts in (True, False):
            compare(
                lambda v, a=how, c=(ceil, counts): operators.avg_pool(v, dims, *a, *c),
                lambda v, a=how, c=(ceil, counts): mean(v, *a, *c),
                x,
            )
    compare(lambda v: operators.max_pool(v, dims, 2, 1, 0, 2), lambda v: largest(v, 2, 1, 0, 2), x)


@dims_one_to_three
@pytest.mark.parametrize("size", [1, 2, 3])
def test_adaptive_pooling(dims, size):
    x = floats(2, 3, *(7, 6, 5)[:dims])
    for kind in ("avg", "max"):
        own, peer = getattr(operators, f"adaptive_{kind}_pool"), getattr(functional, f"adaptive_{kind}_pool{dims}d")
        compare(lambda v, f=own: f(v, [size] * dims), lambda v, f=peer: f(v, size), x)


def test_a_free_dim_of_adaptive_pooling_and_a_given_divisor():
    x = floats(2, 3, 5, 6)
    compare(
        lambda v: operators.adaptive_avg_pool(v, [None, 1]), lambda v: functional.adaptive_avg_pool2d(v, (None, 1)), x
    )
    compare(
        lambda v: operators.avg_pool(v, 2, 2, divisor_override=3),
        lambda v: functional.avg_pool2d(v, 2, divisor_override=3),
        x,
    )


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "bicubic"])
@pytest.mark.parametrize("target", [(7, 9), 2.0, 1.7, (0.6, 2.5), (3, 2), (1, 1), (10, 8)], ids=str)
def test_resampling(mode, target):
    sized = isinstance(target, tuple) and isinstance(target[0], int)
    how = {"size": target} if sized else {"scale_factor": target}
    corner_cases = (None,) if "nearest" in mode else (False, True)
    for x, corners in itertools.product((floats(2, 3, 5, 4), floats(2, 3, 5, 4).double()), corner_cases):
        wanted = functional.interpolate(x, mode=mode, align_corners=corners, **how)
        compare(
            lambda v, c=corners, s=wanted.shape[2:]: operators.interpolate(
                v, s, mode, bool(c), None if sized else target
            ),
            lambda v, w=wanted: w,
            x,
            atol=1e-5 if x.dtype == torch.float32 else 1e-13,
        )


def test_resampling_of_signals_and_volumes():
    for mode, x in (("linear", floats(2, 3, 5)), ("trilinear", floats(2, 3, 3, 4, 5))):
        sizes = [3 * n for n in x.shape[2:]]
        compare(
            lambda v, m=mode, s=sizes: operators.interpolate(v, s, m),
            lambda v, m=mode, s=sizes: functional.interpolate(v, s, mode=m),
            x,
            atol=1e-5,
        )
    with pytest.raises(ValueError, match="lanczos"):
        operators.interpolate(hidet.symbol([1, 1, 4], "float32", "cpu"), [8], "lanczos")


def test_normalizations():
    x, by_channel, last = floats(2, 6, 4, 3), (floats(6), floats(6) + 1), (floats(3), floats(3) + 1)
    compare(
        lambda v, w, b: operators.layer_norm(v, [4, 3], w, b),
        lambda v, w, b: functional.layer_norm(v, [4, 3], w, b),
        x, floats(4, 3), floats(4, 3), atol=1e-5,
    )  # fmt: skip
    compare(
        lambda v, w, b: operators.native_layer_norm(v, [3], w, b, 1e-5),
        lambda v, w, b: torch.native_layer_norm(v, [3], w, b, 1e-5),
        x, *last, atol=2e-4,
    )  # fmt: skip
    for own, peer in (
        (lambda v, w, b: operators.group_norm(v, 3, w, b), lambda v, w, b: functional.group_norm(v, 3, w, b)),
        (operators.instance_norm, lambda v, w, b: functional.instance_norm(v, None, None, w, b)),
        (operators.batch_norm_of_batch, lambda v, w, b: functional.batch_norm(v, None, None, w, b, True)),
    ):
        compare(own, peer, x, *by_channel, atol=1e-5)
    compare(
        operators.batch_norm,
        lambda v, w, b, m, s: functional.batch_norm(v, m, s, w, b),
        x, *by_channel, floats(6), floats(6).abs() + 0.1, atol=1e-5,
    )  # fmt: skip
    compare(
        lambda v, w: operators.rms_norm(v, [3], w), lambda v, w: functional.rms_norm(v, [3], w), x, last[0], atol=1e-5
    )
