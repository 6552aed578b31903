"""Serves what ``build_decoder.py`` built, as users do: hidet and transformers are not imported in this process."""

from __future__ import annotations

import numpy as np

import hidet_dist


def serve(artifacts: str) -> None:
    """Make the steps twice, with all states reset in between, and compare their logits."""
    with np.load(f"{artifacts}.npz") as data:
        count = 1 + max(int(name.partition(".")[0]) for name in data.files if "." in name)
        given = [
            {name.partition(".")[2]: data[name] for name in data.files if name.startswith(f"{number}.")}
            for number in range(count)
        ]
        tolerance = float(data["tolerance"])
    worst = 0.0
    with hidet_dist.load_partition(artifacts) as partition:
        partition.warm_up()
        for _ in range(2):
            for number, inputs in enumerate(given):
                expected = inputs["expected"]
                logits = partition(**{name: x for name, x in inputs.items() if name != "expected"})
                worst = max(worst, float(np.abs(logits - expected).max() / np.abs(expected).max()))
                assert worst <= tolerance, f"step {number} is off by {worst:.2e}; rounding explains {tolerance:.0e}"
            partition.profile(**{name: x for name, x in given[-1].items() if name != "expected"})
            partition.reset()
        print(f"off by {worst:.1e} of {tolerance:.0e}; {partition.device_bytes} bytes held")
