"""The test cases of the ONNX project, as `make onnx-cases` checks them: right, or refused by name."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from onnx.backend.test.case import node as node_cases

from benchmarks import onnx_cases

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "onnx-cases.json"

# Modules of the package's cases, and the names of those that are taken.
SAMPLE = {
    "add": ("test_add_bcast", "test_add_int16", "test_add_uint64"),
    "gather": ("test_gather_negative_indices",),
    "layernormalization": ("test_layer_normalization_3d_axis1_epsilon",),
    "averagepool": ("test_averagepool_2d_ceil_last_window_starts_on_pad",),
    "reduce_log_sum": ("test_reduce_log_sum_negative_axes",),
    "reduce_log_sum_exp": ("test_reduce_log_sum_exp_do_not_keepdims_random",),
    "reducel2": ("test_reduce_l2_do_not_keepdims_example",),
    "resize": ("test_resize_upsample_scales_linear_align_corners", "test_resize_downsample_sizes_nearest"),
    "reshape": ("test_reshape_zero_and_negative_dim",),
    "slice": ("test_slice_negative_axes",),
    "split": ("test_split_variable_parts_1d_opset18",),
    "topk": ("test_top_k_uint64", "test_top_k_smallest"),
    "unique": ("test_unique_sorted_with_axis",),
}
REFUSED = {"test_unique_sorted_with_axis"}  # the size of its output depends on data


def test_a_sample_of_the_cases():
    known = len(node_cases._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in SAMPLE:
            importlib.import_module(f"{node_cases.__name__}.{name}")
    cases = onnx_cases.of_operators(node_cases._NodeTestCases[known:])
    outcomes = {name: onnx_cases.check(cases[name]) for names in SAMPLE.values() for name in names}
    assert {name: own.reason for name, own in outcomes.items() if own.verdict == "wrong"} == {}
    assert {name for name, own in outcomes.items() if own.verdict == "refused"} == REFUSED


@pytest.mark.slow
def test_no_case_is_wrong(tmp_path):
    out = tmp_path / "outcomes.json"
    command = [sys.executable, "-m", "benchmarks.onnx_cases", "--jobs", "2", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["right"] >= 1000, counts
    published, found = json.loads(RESULTS.read_text())["results"], json.loads(out.read_text())["results"]
    assert found == published


def test_no_case_of_the_published_table_is_wrong():
    outcomes = json.loads(RESULTS.read_text())["results"]
    assert sum(own["right"] for own in outcomes.values()) >= 1000
    for own in outcomes.values():
        assert own["wrong"] == 0
        assert sum(own["why"].values()) == own["refused"]
