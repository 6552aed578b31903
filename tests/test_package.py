"""The import of the package."""

import subprocess
import sys

import hidet
import pytest
from tests.imports import CHECKED_IMPORTS

import hidet_dist


def test_importing_it_adds_the_calls_to_hidet_distributed():
    for name in ("auto_parallel", "partition", "load_partition", "init", "shutdown"):
        assert getattr(hidet.distributed, name) is getattr(hidet_dist, name)
    for name in ("DeviceMesh", "TensorShardSpec", "OpShardSpec", "ReduceFn", "Plan"):
        assert getattr(hidet.distributed, name) is getattr(hidet_dist, name)
    assert callable(hidet.distributed.init_process_group)  # hidet's own calls are left as they were


def test_every_error_of_the_project_has_one_root():
    from hidet_dist import errors

    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert len(classes) > 10
    assert all(issubclass(c, errors.HidetDistError | Warning) for c in classes)


@pytest.mark.slow  # quickly, a process of test_bad_input.py checks the one order that the first example does not have
@pytest.mark.parametrize("order", ["hidet, hidet_dist", "hidet_dist.weights, hidet_dist, hidet"])
def test_the_order_of_imports_does_not_matter(order):
    program = f"import {order}\n{CHECKED_IMPORTS}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
