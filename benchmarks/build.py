"""Build GPT-2 of growing depth, twice: what a build takes, and what the next one does; the last line is JSON.

    python -m benchmarks.build [--cases NAME ...] [--out FILE]

A case is a target and a number of layers: ``cpu_32`` is GPT-2 of hidden size 256 on two CPU ranks, ``cuda_32`` the same
on two GPUs of a DGX H100. It is built in a process of its own with an empty cache, and again, with other weights, in
another process with the cache that the first has left. Cases of the target cuda are left out where there is no nvcc.
Time is CPU time, so that other work on the machine does not matter. ``--out`` keeps the results of other cases that the
file has, so that cases can be measured one at a time. Of each:

seconds                CPU seconds of the first build, of its process and all compilers. ``parts`` of the process are
                       ``plan``, ``partition``, ``passes``, ``compile``, ``weights`` (written while compilers run) and
                       ``write`` (of everything else); ``compilers`` are all others.
second_build_seconds   the same of the second build, and ``second_parts``.
kernels, compiled      kernels of the artifacts, and how many of them the first and the second build compiled.
peak_rss_bytes         of the first build's process.
goals                  what ``seconds`` and ``second_build_seconds`` should be at most, and the most times ``seconds``
                       should be of those with 2 layers.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

LAYERS = (2, 8, 32, 96)
TARGETS = ("cpu", "cuda")
CASES = [f"{target}_{layers}" for target in TARGETS for layers in LAYERS]
GOALS = {"cpu_32": {"seconds": 15.0, "second_build_seconds": 3.0, "times_of_2_layers": 2.0}}
HIDDEN = 256
MIB = 2**20


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@contextmanager
def _timed(parts: dict[str, float]) -> Iterator[None]:
    """Measure the CPU seconds that this process spends in each part of a build."""
    from hidet_dist.compile import build
    from hidet_dist.phases import values

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return call(*arguments, **named)
            finally:
                parts[part] = parts.get(part, 0.0) + time.process_time() - begin

        return run

    with (
        mock.patch.object(values, "find_plans", timed("plan", values.find_plans)),
        mock.patch.object(values.Planned, "partition", timed("partition", values.Planned.partition)),
        mock.patch.object(values, "compile_program", timed("compile", values.compile_program)),
        mock.patch.object(values, "write_weights", timed("weights", values.write_weights)),
        mock.patch.object(values, "write_artifacts", timed("write", values.write_artifacts)),
        mock.patch.object(build, "optimize_program", timed("passes", build.optimize_program)),
    ):
        yield


def measure(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Build one case in this process, which must have been started for it, with the cache in ``folder``."""
    import hidet

    from hidet_dist import api
    from hidet_dist.testing import models

    target, layers = name.split("_")
    hidet.option.cache_dir(str(folder / "cache"))
    graph, _ = models.gpt2(int(layers), hidden=HIDDEN, seed=seed)
    machine = {} if target == "cpu" else {"machine": "dgx-h100"}
    before = set((folder / "cache").rglob("lib.so"))
    parts: dict[str, float] = {}
    begin, begin_children = time.process_time(), _children()
    with _timed(parts):
        api.auto_parallel(graph, {"mesh_shape": [2], **machine}, {"target": target}, folder / "artifacts")
    own = time.process_time() - begin
    parts["compile"] -= parts["passes"] + parts["weights"]
    parts["compilers"] = _children() - begin_children
    new = set((folder / "cache").rglob("lib.so")) - before
    return {
        "seconds": round(own + parts["compilers"], 2),
        "parts": {part: round(seconds, 2) for part, seconds in parts.items()},
        "kernels": len(list((folder / "artifacts").rglob("kernels/*.so"))),
        "compiled": sum("launchers" not in path.parts for path in new),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _in_process(name: str, folder: str, seed: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.build", "--one", name, folder, str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _has_nvcc() -> bool:
    from hidet_dist.errors import CompileError
    from hidet_dist.toolchain.cuda import find_toolkit

    try:
        find_toolkit()
    except CompileError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--out", type=Path, metavar="FILE", help="a JSON file to write the results to, case by case")
    parser.add_argument("--one", nargs=3, metavar=("CASE", "FOLDER", "SEED"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        name, folder, seed = given.one
        print(json.dumps(measure(name, Path(folder), int(seed))))
        return
    results: dict[str, Any] = {}
    kept: dict[str, Any] = {}
    if given.out is not None and given.out.exists():
        kept = json.loads(given.out.read_text(encoding="utf-8"))
    nvcc = _has_nvcc()
    for name in given.cases:
        if name.startswith("cuda") and not nvcc:
            print(f"{name}: left out, as there is no nvcc", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory() as folder:
            first, second = (_in_process(name, folder, seed) for seed in (0, 1))
        results[name] = {
            **first,
            "second_build_seconds": second["seconds"],
            "second_parts": second["parts"],
            "compiled": [first["compiled"], second["compiled"]],
            "goals": GOALS.get(name, {}),
        }
        print(
            f"{name}: {first['seconds']} CPU s {first['parts']}, then {second['seconds']}; {first['kernels']} kernels, "
            f"{first['peak_rss_bytes'] / MIB:.0f} MiB",
            file=sys.stderr,
        )
        if given.out is not None:
            kept[name] = results[name]
            ordered = {case: kept[case] for case in CASES if case in kept}
            given.out.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
