"""Grid sampling, antialiased interpolation, shifts and products of integers beside PyTorch's."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from tests.operators.against_torch import compare, floats, integers
from torch.nn import functional

from hidet_dist import operators
from hidet_dist.operators import elementwise, resampling

TORCH = {"linear": "bilinear", "nearest": "nearest", "cubic": "bicubic"}


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_grid_sampling(padding):
    images, points = floats(2, 3, 5, 4), floats(2, 3, 6, 2) * 1.5
    for mode, corners in itertools.product(TORCH, (False, True)):
        compare(
            lambda x, g, m=mode, c=corners: operators.grid_sample(x, g, m, padding, c),
            lambda x, g, m=mode, c=corners: functional.grid_sample(x, g, TORCH[m], padding, c),
            images,
            points,
            atol=1e-4,
        )
    volumes, places = floats(2, 2, 3, 4, 5), floats(2, 2, 3, 1, 3) * 1.5
    compare(
        lambda x, g: operators.grid_sample(x, g, "linear", padding, False),
        lambda x, g: functional.grid_sample(x, g, "bilinear", padding, False),
        volumes,
        places,
        atol=1e-5,
    )


def test_antialiased_interpolation():
    x = floats(2, 3, 11, 8)
    for mode, size, corners in itertools.product(("bilinear", "bicubic"), ((4, 5), (5, 13)), (False, True)):
        compare(
            lambda v, m=mode, s=size, c=corners: resampling.upsample_antialiased(v, s, c, None, m == "bicubic"),
            lambda v, m=mode, s=size, c=corners: functional.interpolate(v, s, mode=m, align_corners=c, antialias=True),
            x,
            atol=1e-5,
        )


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
def test_shifts(dtype):
    x = integers(-100, 100, 4, 5).to(dtype)
    places = integers(0, 70, 4, 5).to(dtype)
    compare(elementwise.bitwise_left_shift, torch.bitwise_left_shift, x, places)
    compare(elementwise.bitwise_right_shift, torch.bitwise_right_shift, x, places)
    compare(lambda v: elementwise.bitwise_right_shift(v, 3), lambda v: torch.bitwise_right_shift(v, 3), x)


def test_products_of_integers():
    x, y = integers(-128, 128, 3, 40).to(torch.int8), integers(-128, 128, 40, 5).to(torch.int8)
    compare(lambda a, b: operators.integer_matmul(a, b, "int32"), torch._int_mm, x.repeat(8, 1), y.repeat(1, 8)[:, :8])
    compare(operators.matmul, torch.matmul, integers(-9, 9, 2, 1, 3, 4), integers(-9, 9, 5, 4, 2))
    compare(operators.matmul, torch.matmul, integers(-9, 9, 4), integers(-9, 9, 2, 4, 3))
    compare(operators.matmul, torch.matmul, integers(-9, 9, 2, 3, 4), integers(-9, 9, 4))


def test_convolutions_of_integers():
    x, weight = integers(0, 256, 2, 4, 9, 8).to(torch.uint8), integers(-128, 128, 6, 2, 3, 2).to(torch.int8)

    def reference(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        padded = functional.pad(a.double(), [1, 0, 0, 2])
        return functional.conv2d(padded, b.double(), stride=[2, 1], dilation=[1, 2], groups=2).to(torch.int32)

    compare(lambda a, b: operators.integer_convolution(a, b, [2, 1], [(0, 2), (1, 0)], [1, 2], 2), reference, x, weight)


def test_weights_of_stretched_kernels_add_up_to_one():
    for within, coefficient in itertools.product((False, True), (None, -0.75)):
        weights = resampling.stretched_weights(7, np.array([-0.4, 2.0, 6.3]), 2.5, coefficient, within)
        np.testing.assert_allclose(weights.sum(0), 1, atol=1e-12)
