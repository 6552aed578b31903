"""One long-lived process that runs one variant of one case on a GPU: as :mod:`worker`, which does it on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu.cases import CASES
from benchmarks.serving import worker

Loaded = tuple[Callable[[], Any], Callable[[int], dict[str, Any]]]


def load(settings: dict[str, Any]) -> Loaded:
    """A call of the model on its inputs, which returns when the device is through, and one that says what it holds."""
    with np.load(settings["inputs"]) as arrays:
        inputs = [arrays[name] for name in arrays.files]
    device = settings["device"]
    return (load_hidet if settings["how"] == "hidet" else load_torch)(settings, inputs, device)


def load_hidet(settings: dict[str, Any], inputs: list[Any], kind: str) -> Loaded:
    """hidet_dist, called with tensors of PyTorch on the device, or of NumPy where PyTorch has none."""
    from hidet_dist.runtime.partition import load_partition

    model = load_partition(Path(settings["artifacts"]))
    if kind == "cuda":
        import torch

        from hidet_dist.runtime.cuda.driver import device_of_rank

        device = f"cuda:{device_of_rank(model.rank)}"
        torch.cuda.set_device(device)
        inputs = [torch.from_numpy(x).to(device) for x in inputs]

    def profiled(calls: int) -> dict[str, Any]:
        profiles = sorted((model.profile(*inputs) for _ in range(calls)), key=lambda own: own.call_seconds)
        middle = profiles[len(profiles) // 2]
        kernels: dict[tuple[str, str], list[float]] = {}
        for operator in middle.operators:
            kernels.setdefault((operator.name, operator.output), []).append(operator.seconds)
        return {
            "kernel_seconds": middle.compute_seconds,
            "collective_seconds": middle.communication_seconds,
            "device_bytes": model.device_bytes,
            "kernels": [
                {"name": name, "writes": output, "count": len(own), "seconds": sum(own)}
                for (name, output), own in sorted(kernels.items(), key=lambda item: -sum(item[1]))
            ],
        }

    return lambda: model(*inputs), profiled


def load_torch(settings: dict[str, Any], inputs: list[Any], device: str) -> Loaded:
    """PyTorch's model. Its graphs are of a stream that is waited for after each call, as hidet_dist does."""
    import torch

    run = CASES[settings["case"]].peer(Path(settings["weights"]), device, settings["how"])
    tensors = [torch.from_numpy(x).to(device) for x in inputs]
    if device == "cuda":  # what loading took beside the weights does not count
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def call() -> Any:
        y = run(*tensors)
        if device == "cuda":
            torch.cuda.synchronize()
        return y

    def profiled(_calls: int) -> dict[str, Any]:
        return {"device_bytes": torch.cuda.max_memory_allocated()} if device == "cuda" else {}

    return call, profiled


if __name__ == "__main__":
    worker.main(load)
