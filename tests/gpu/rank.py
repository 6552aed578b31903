"""One rank of a check on GPUs: ``rank.py collectives`` or ``rank.py serve ARTIFACTS PRECISION``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import checked

import hidet_dist
from hidet_dist.runtime import session
from hidet_dist.runtime.cuda.driver import device_of_rank
from hidet_dist.runtime.libraries import hidet_runtime

# Of the largest value: float16 has 11 bits of mantissa, and sums of some hundred roundings lie behind each value.
TOLERANCE = {"float32": 1e-4, "float16": 2e-2}


def collectives() -> None:
    """Every collective, dtype, reduction and group, on device memory, against NumPy."""
    session.init()
    settings = session.current()
    assert settings is not None
    device = torch.device("cuda", device_of_rank(settings.rank))
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    hidet_runtime().use_torch_cuda_stream(False)  # the default stream, which is torch's too
    on_host = checked.as_dtype
    checked.as_dtype = lambda values, dtype: on_host(values, dtype).to(device)
    mesh = (2, settings.world_size // 2) if settings.world_size > 2 else (settings.world_size,)
    calls = 0
    with session.communicator_for(mesh, target="cuda") as communicator:
        communicator.warm_up(range(1 << len(mesh)))
        communicator.bind()
        for group in range(1 << len(mesh)):
            own = checked.Checked(communicator, mesh, group, host=False)
            own.everything()
            calls += own.calls
    if settings.rank == 0:
        print(f"{calls} collectives of each rank are right")


def serve(artifacts: str, precision: str) -> None:
    """A program's answers, to inputs on the host and on the device, against the whole model's."""
    with np.load(f"{artifacts}.npz") as data:
        inputs = [data[name] for name in data.files if name.startswith("arr_")]
        expected = [data[f"expected{number}"] for number in range(len(data.files) - len(inputs))]
    worst = 0.0
    with hidet_dist.load_partition(artifacts) as model:
        device = f"cuda:{device_of_rank(model.rank)}"
        torch.cuda.set_device(device)
        on_device = [torch.from_numpy(x).to(device) for x in inputs]
        for given in (inputs, inputs, inputs, on_device, on_device):
            for number, (answer, whole) in enumerate(zip(model.run(given), expected, strict=True)):
                assert given is inputs or answer.device == torch.device(device), answer.device
                y = answer if given is inputs else answer.cpu().numpy()
                assert y.dtype == whole.dtype, (y.dtype, whole.dtype)
                if np.issubdtype(whole.dtype, np.integer):
                    if precision == "float32":  # in half precision the likeliest word may be another one
                        np.testing.assert_array_equal(y, whole)
                    continue
                error = float(np.abs(y.astype(np.float64) - whole).max() / max(1.0, float(np.abs(whole).max())))
                worst = max(worst, error)
                assert error < TOLERANCE[precision], f"output {number} is off by {error:.2e} of its largest value"
        profile = model.profile(*on_device)
        if model.rank == 0:
            compute, communication = 1e3 * profile.compute_seconds, 1e3 * profile.communication_seconds
            print(f"off by {worst:.1e} at most; kernels {compute:.3f} ms, collectives {communication:.3f} ms")


if sys.argv[1] == "collectives":
    collectives()
else:
    serve(*sys.argv[2:])
