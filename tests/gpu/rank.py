"""One rank of a check on GPUs: ``rank.py collectives``, ``rank.py serve ARTIFACTS``, ``rank.py decoder ARTIFACTS``."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
import checked
import decoder

import hidet_dist
from hidet_dist.runtime import session
from hidet_dist.runtime.cuda.driver import device_of_rank
from hidet_dist.runtime.libraries import hidet_runtime


def collectives(kind: str = "cuda") -> None:
    """Every collective, dtype, reduction and group, on device memory, against NumPy.

    ``kind`` is that of PyTorch's device.
    """
    session.init()
    settings = session.current()
    assert settings is not None
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, device_of_rank(settings.rank))
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


def serve(artifacts: str, device: str | None = None) -> None:
    """A program's answers, to inputs on the host and on the device, against those of PyTorch's model in float64.

    ``device`` is PyTorch's, by default the rank's.
    """
    with np.load(f"{artifacts}.npz") as data:
        inputs = [data[name] for name in data.files if name.startswith("arr_")]
        expected, tolerance, rms = data["expected"], float(data["tolerance"]), float(data["rms"])
    largest, worst, worst_rms = float(np.abs(expected).max()), 0.0, 0.0
    with hidet_dist.load_partition(artifacts) as model:
        if device is None:
            device = f"cuda:{device_of_rank(model.rank)}"
            torch.cuda.set_device(device)
        on_device = [torch.from_numpy(x).to(device) for x in inputs]
        for given in (inputs, inputs, inputs, on_device, on_device):
            (answer,) = model.run(given)
            assert given is inputs or answer.device == torch.device(device), answer.device
            y = answer if given is inputs else answer.cpu().numpy()
            assert y.dtype == np.float32, y.dtype
            error = y.astype(np.float64) - expected
            worst = max(worst, float(np.abs(error).max()) / largest)
            worst_rms = max(worst_rms, float(np.sqrt(np.square(error).mean())))
            assert worst <= tolerance, f"off by {worst:.2e} of the largest value; rounding explains {tolerance:.2e}"
            assert worst_rms <= rms, f"off by {worst_rms:.2e} in the mean; twice PyTorch's error is {rms:.2e}"
        profile = model.profile(*on_device)
        stage = model.stage
        planned = stage.weight_bytes + sum((stage.workspace_bytes or {}).values())
        # The stage's are those of the rank with the largest parts.
        assert stage.parts or model.device_bytes >= planned, (model.device_bytes, planned)
        if model.rank == 0:
            compute, communication = 1e3 * profile.compute_seconds, 1e3 * profile.communication_seconds
            print(
                f"off by {worst:.1e} of {tolerance:.1e}; kernels {compute:.3f} ms, collectives {communication:.3f} ms; "
                f"{model.device_bytes} bytes held, {planned} of them weights and workspace"
            )


if __name__ == "__main__":
    if sys.argv[1] == "collectives":
        collectives()
    elif sys.argv[1] == "decoder":
        decoder.serve(sys.argv[2])
    else:
        serve(*sys.argv[2:])
