"""Kernels for CUDA are cached by all that they are made from; no nvcc is needed to tell."""

from dataclasses import replace
from pathlib import Path

import hidet

from hidet_dist.compat.cpu_build import content_of
from hidet_dist.compile.cuda.build import kernel_key
from hidet_dist.machine.gpu import GPUS
from hidet_dist.toolchain.cuda import Toolkit

GPU = next(iter(GPUS.values()))
TOOLKIT = Toolkit(Path("/nvcc"), "13.0.88", Path("/lib"))


def test_equal_builds_have_equal_keys():
    assert kernel_key(GPU, (), TOOLKIT) == kernel_key(replace(GPU), (), replace(TOOLKIT))


def test_whatever_changes_a_kernel_changes_the_key():
    keys = [
        kernel_key(GPU, (), TOOLKIT),
        kernel_key(GPU, ("float32",), TOOLKIT),
        kernel_key(replace(GPU, multiprocessors=GPU.multiprocessors + 1), (), TOOLKIT),
        kernel_key(GPU, (), replace(TOOLKIT, version="13.0.99")),
    ]
    with hidet.option.context():
        hidet.option.set_option("cuda.build.ftz", not hidet.option.get_option("cuda.build.ftz"))
        keys.append(kernel_key(GPU, (), TOOLKIT))
    assert len(set(keys)) == len(keys)


def test_a_changed_source_changes_the_key(tmp_path):
    source = tmp_path / "deep" / "rows.py"
    source.parent.mkdir()
    keys = set()
    for text in ("a = 1", "a = 2", "a = 1"):
        source.write_text(text)
        content_of.cache_clear()  # sources do not change within a process
        keys.add(kernel_key(GPU, (), TOOLKIT, [str(tmp_path)]))
    assert len(keys) == 2
