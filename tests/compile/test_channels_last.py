"""Convolutions by weights, which run with the channels last, and what stands between them, against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import hidet
import numpy as np
import pytest
import safetensors.torch
import torch
from hidet import ops
from hidet.graph import Operator, Tensor
from torch.nn import functional

import hidet_dist
from hidet_dist.artifacts import Manifest
from hidet_dist.compile import optimize_program
from hidet_dist.machine import builtin
from hidet_dist.normalize import normalize
from hidet_dist.operators.pooling import avg_pool
from hidet_dist.partitioning import partition_graph
from hidet_dist.search import search
from hidet_dist.spec import DeviceMesh
from hidet_dist.weights.packing import packed
from hidet_dist.weights.panels import PANEL_WIDTHS, Panels


def constant(*shape: int) -> Tensor:
    values = np.random.default_rng(sum(shape)).standard_normal(shape, np.float32)
    return hidet.asarray(values / np.float32(np.sqrt(np.prod(shape[1:]))))


def operators_of(y: Tensor | list[Tensor], *inputs: Tensor) -> list[Operator]:
    """The operators that run for a graph on one device, but for those that move no elements."""
    graph = normalize(hidet.trace_from(y, list(inputs)))
    program = partition_graph(graph, search(graph, builtin("cpu", DeviceMesh((1,)))).plan.stages[0])
    return [node for node in optimize_program(program).nodes if node.name != "Reshape"]


def names_of(y: Tensor | list[Tensor], *inputs: Tensor) -> list[str]:
    """Their names."""
    return [node.name for node in operators_of(y, *inputs)]


def scaled_of(y: Tensor | list[Tensor], *inputs: Tensor) -> list[bool]:
    """Of each convolution by panels, whether it scales its input."""
    return [node.attrs["scaled"] for node in operators_of(y, *inputs) if node.name == "PanelConvolution"]


def image(*shape: int | str) -> Tensor:
    return hidet.symbol(list(shape), "float32", "cpu")


FILTERS = {
    "stem": constant(20, 3, 7, 7),
    "depthwise": constant(20, 1, 3, 3),
    "square": constant(20, 20, 3, 3),
    "grouped": constant(48, 10, 3, 3),
    "last": constant(20, 48, 1, 1),
}
BIAS = constant(20)


def network(x: Any, conv: Callable[..., Any], nn: Any, bias: Any) -> list[Any]:
    """A network with what models have between convolutions, in terms of a library's functions."""
    y = nn.pad(nn.relu(conv(x, "stem", 2, 3, 1, 1) + bias), 1)
    y = nn.max_pool(y)
    y = nn.relu(conv(y, "square", 1, 1, 1, 1) + bias) + y
    z = conv(y, "depthwise", 2, 1, 1, 20)
    z = z * nn.sigmoid(nn.mean(z, True))
    u = nn.relu(conv(z, "grouped", 1, 2, 2, 2))
    v = conv(u, "last", 1, 0, 1, 1)
    return [nn.mean(nn.cat([u, v]), False), nn.avg_pool(v) * 2.0]


class InHidet:
    """hidet's functions."""

    relu, sigmoid = staticmethod(ops.relu), staticmethod(ops.sigmoid)
    pad = staticmethod(lambda x, size: ops.pad(x, [size] * 4))
    max_pool = staticmethod(lambda x: ops.max_pool2d(x, 3, 2, 1))
    avg_pool = staticmethod(lambda x: avg_pool(x, 2, 2, 1, 1, count_include_pad=False))
    mean = staticmethod(lambda x, keep: ops.mean(x, [2, 3], keep_dim=keep))
    cat = staticmethod(lambda parts: ops.concat(parts, 1))


class InTorch:
    """PyTorch's."""

    relu, sigmoid = torch.relu, torch.sigmoid
    pad = staticmethod(lambda x, size: functional.pad(x, [size] * 4))
    max_pool = staticmethod(lambda x: functional.max_pool2d(x, 3, 2, 1))
    avg_pool = staticmethod(lambda x: functional.avg_pool2d(x, 2, 1, 1, count_include_pad=False))
    mean = staticmethod(lambda x, keep: x.mean((2, 3), keepdim=keep))
    cat = staticmethod(lambda parts: torch.cat(parts, 1))


def in_hidet(x: Tensor) -> list[Tensor]:
    def conv(x: Tensor, name: str, stride: int, pad: int, dilation: int, groups: int) -> Tensor:
        return ops.conv2d(x, FILTERS[name], stride=stride, padding=pad, dilations=dilation, groups=groups)

    return network(x, conv, InHidet, BIAS.unsqueeze([0, 2, 3]))


def in_torch(x: torch.Tensor) -> list[torch.Tensor]:
    def conv(x: torch.Tensor, name: str, stride: int, pad: int, dilation: int, groups: int) -> torch.Tensor:
        return torch.conv2d(x, FILTERS[name].torch().double(), None, stride, pad, dilation, groups)

    return network(x.double(), conv, InTorch, BIAS.torch().double()[:, None, None])


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("channels_last") / "artifacts"
    x = image("images", 3, 19, 17)
    graph = hidet.trace_from(in_hidet(x), [x])
    hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {"symbols": {"images": 2}}, folder)
    return folder


def test_a_network_gives_what_pytorch_gives_and_each_image_the_same_beside_others(built: Path) -> None:
    x = torch.randn(3, 3, 19, 17, generator=torch.Generator().manual_seed(0))
    with hidet_dist.load_partition(built) as partition:
        results = partition(x)
        for result, expected in zip(results, in_torch(x), strict=True):
            torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-6)
        for one, whole in zip(partition(x[1:2]), results, strict=True):
            assert torch.equal(one, whole[1:2])


def test_artifacts_hold_filters_as_kernels_read_them(built: Path) -> None:
    manifest = Manifest.load(built)
    (stage,) = manifest.program().stages
    stored = safetensors.torch.load_file(built / manifest.weights_files[0])
    width = PANEL_WIDTHS[manifest.arch]
    expected = {
        "stem": Panels(1, 147, 20, True, width, taps=49),
        "depthwise": Panels(1, 9, 20, True, width),
        "square": Panels(16, 20, 20, True, width, winograd=True),
        "grouped": Panels(2, 90, 24, True, width, taps=9),
        "last": Panels(1, 48, 20, True, width),
    }
    assert set(stage.panels.values()) == set(expected.values())
    for name, panels in stage.panels.items():
        (label,) = (label for label, one in expected.items() if one == panels)
        assert torch.equal(stored[name], packed(FILTERS[label].torch(), panels))
    assert "openblas" not in stage.libraries


def test_only_the_ends_of_a_network_change_the_layout() -> None:
    x = image(1, 3, 19, 17)
    names = names_of(in_hidet(x), x)
    assert names.count("PanelConvolution") == len(FILTERS)
    assert sum("Permute" in name for name in names) == 1  # the input: the end is part of its kernel
    assert "BlasConvolution" not in names


def test_layers_that_want_the_channels_last_take_them_so() -> None:
    x, shift = image(1, 8, 6, 5), constant(8)
    y = ops.conv2d(x, constant(8, 1, 7, 7), padding=3, groups=8)
    z = ops.layer_norm(ops.transpose(y, [0, 2, 3, 1]), 1) * shift
    z = ops.matmul(ops.gelu(ops.matmul(z, constant(8, 32))), constant(32, 8))
    z = y + ops.transpose(z, [0, 3, 1, 2])
    names = names_of(ops.mean(ops.conv2d(z, constant(12, 8, 2, 2), stride=2), [2, 3]), x)
    assert sum("Permute" in name for name in names) == 1  # the input
    assert names.count("PanelConvolution") == 2


def test_what_is_no_image_keeps_its_layout() -> None:
    x, w = image(2, 8, 12), constant(20, 20)
    y = ops.relu(ops.conv1d(ops.pad(x, [1, 1]), constant(20, 8, 3)))
    tokens = ops.transpose(y, [0, 2, 1])
    z = ops.matmul(ops.gelu(ops.matmul(tokens, w) + tokens), w) + tokens
    assert sum("Permute" in name for name in names_of(z, x)) == 1  # the input


def test_sums_of_layers_behind_a_convolution_keep_the_layout_of_products() -> None:
    x = image(2, 8, 12)
    y = ops.gelu(ops.conv1d(ops.pad(x, [1, 1]), constant(16, 8, 3)))
    y = ops.gelu(ops.conv1d(ops.pad(y, [1, 1]), constant(20, 16, 3), stride=2))
    z = ops.transpose(y, [0, 2, 1]) + constant(6, 20)
    for _ in range(4):
        z = z + ops.matmul(ops.gelu(ops.matmul(ops.layer_norm(z, 1), constant(20, 40))), constant(40, 20))
    layer = ["Normalize", "BlasMatmul", "BlasMatmul"]
    assert names_of(z, x) == ["PermuteDims", "PanelConvolution", "PanelConvolution", *layer * 4]


def test_filters_that_are_no_weights_are_multiplied_by_a_blas() -> None:
    x, w = image(1, 4, 6, 6), image(8, 4, 3, 3)
    assert names_of(ops.conv2d(x, w), x, w) == ["BlasConvolution"]


def test_filters_that_other_operators_read_stay_as_they_are(tmp_path: Path) -> None:
    x, w = image(1, 5, 6, 7), constant(9, 5, 3, 3)
    scaled = w * ops.mean(x, [0, 1, 2, 3], keep_dim=True)
    y = ops.conv2d(x, w, padding=1) + ops.sum(scaled, [1, 2, 3]).unsqueeze([0, 2, 3])
    hidet_dist.auto_parallel(hidet.trace_from(y, [x]), {"mesh_shape": [1]}, {}, tmp_path / "out")
    assert not Manifest.load(tmp_path / "out").program().stages[0].panels
    pixels = torch.randn(1, 5, 6, 7, generator=torch.Generator().manual_seed(0))
    shift = (w.torch() * pixels.mean()).sum((1, 2, 3))
    expected = torch.conv2d(pixels, w.torch(), padding=1) + shift[:, None, None]
    with hidet_dist.load_partition(tmp_path / "out") as partition:
        torch.testing.assert_close(partition(pixels), expected, rtol=1e-5, atol=1e-5)


def excited(x: Any, conv: Callable[[Any], Any], nn: Any, is_first: bool) -> Any:
    """Squeeze and excitation of some pixels before a convolution, with a residual sum of it."""
    scale = nn.sigmoid(nn.mean(x, True))
    return nn.relu(conv(x * scale if is_first else scale * x)) + 1.0


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("sizes", [(3, 21, 5, 7), (1, 40, 31, 9)])
def test_a_scale_of_channels_is_part_of_the_convolution_behind_it(
    tmp_path: Path, sizes: tuple[int, ...], is_first: bool
) -> None:
    x, w = image(*sizes), constant(19, sizes[1], 1, 1)
    y = excited(x, lambda z: ops.conv2d(z, w), InHidet, is_first)
    assert scaled_of(y, x) == [True]
    hidet_dist.auto_parallel(hidet.trace_from(y, [x]), {"mesh_shape": [1]}, {}, tmp_path / "out")
    pixels = torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    expected = excited(pixels.double(), lambda z: torch.conv2d(z, w.torch().double()), InTorch, is_first)
    with hidet_dist.load_partition(tmp_path / "out") as partition:
        torch.testing.assert_close(partition(pixels).double(), expected, rtol=1e-5, atol=1e-6)


def test_a_scale_that_others_read_or_that_a_kernel_reads_beside_pixels_is_not() -> None:
    x, w = image(2, 12, 6, 5), constant(8, 12, 1, 1)
    scaled = x * ops.sigmoid(ops.mean(x, [2, 3], keep_dim=True))
    assert scaled_of([ops.conv2d(scaled, w), ops.relu(scaled)], x) == [False]
    assert scaled_of(ops.conv2d(scaled, constant(8, 12, 3, 3)), x) == [False]
    assert scaled_of(ops.conv2d(scaled, w, stride=2), x) == [False]
    assert scaled_of(ops.conv2d(ops.pad(scaled, [0, 0, 1, 1]), w), x) == [False]
