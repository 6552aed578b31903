"""Language models beside llama.cpp, OpenVINO GenAI and transformers on this machine.

    python -m benchmarks.llm [--models smollm2 random] [--precision float32] [--rounds 5] [--new 128] [--out FILE]

SmolLM2-135M, and a LLaMA of random weights of ``--parameters``, run in one process each way, with the same prompts:
prefill of 128 and 1024 tokens up to the next token, and greedy decoding behind prompts of 128 tokens, of one sequence
and of 8 together. Ways take turns, one call at a time; medians are shown, and their ratios to the best peer. The first
token is that of a short prompt, from the start of the process on, with files in the system's cache and artifacts built.
transformers computes in float32 alone. OpenVINO GenAI reads float16 files and the shipped one of 4 bits; beside float32
and bfloat16 it is given the file of float16. Beside float32 it is told to compute in float32; else it computes as it
does by default, which is in bfloat16 where the processor has products of it. A peer that cannot be run is named with
the reason. The last line is JSON.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.generation.models import rewrite, smollm2, write_random
from benchmarks.serving.host import describe
from hidet_dist.files import write_text

ROOT = Path(__file__).parents[1]

WORKER = ["-m", "benchmarks.generation.worker"]
FILES = ROOT / "build" / "bench-llm"
PACKAGES = {"llama.cpp": "llama_cpp", "openvino": "openvino_genai", "transformers": "transformers"}
PROMPT, LONG, BATCH = 128, 1024, 8
MODELS = ("smollm2", "random")
PRECISIONS = ("float32", "float16", "bfloat16", "int4")


@dataclass(frozen=True)
class Variant:
    """One way to run a model: which, on how many threads each of how many ranks."""

    way: str
    threads: int
    ranks: int = 1

    @property
    def name(self) -> str:
        return self.way if self.way != "ours" else f"ours, {self.ranks} x {self.threads} threads"


VARIANTS = (
    Variant("ours", 2),
    Variant("ours", 1),
    Variant("ours", 1, 2),
    Variant("llama.cpp", 2),
    Variant("openvino", 2),
    Variant("transformers", 2),
)


@dataclass
class Running:
    """A process that runs a model, and what was measured of it."""

    process: subprocess.Popen[str]
    first_seconds: float
    times: dict[str, list[float]] = field(default_factory=dict)

    def ask(self, *what: Any) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise RuntimeError(f"it ended with status {self.process.wait()}")
        told: dict[str, float] = json.loads(answer)
        return told

    def note(self, name: str, value: float) -> None:
        self.times.setdefault(name, []).append(value)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(variant: Variant, file: Path, precision: str, errors: Path) -> Running:
    """Start a process, and wait for its first token. Raises RuntimeError with its last words."""
    command = [sys.executable, *WORKER, variant.way, str(file), "--threads", str(variant.threads)]
    command += ["--ranks", str(variant.ranks), "--precision", precision]
    begin = time.monotonic()
    with errors.open("w") as log:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    seconds = time.monotonic() - begin
    if not line:
        process.wait()
        words = errors.read_text().strip().splitlines() or [f"status {process.returncode}"]
        raise RuntimeError(words[-1])
    return Running(process, seconds)


def file_of(model: str, variant: Variant, precision: str, parameters: float) -> Path:
    """Return the file that a variant reads, which is written if it is not there."""
    FILES.mkdir(parents=True, exist_ok=True)
    source = smollm2()
    if model == "random":
        source = FILES / f"random-{int(parameters / 1e6)}M-float32.gguf"
        if not source.exists():
            staging = source.with_suffix(".part")
            write_random(staging, parameters, smollm2())
            staging.rename(source)
    if variant.way == "openvino" and precision in ("float32", "bfloat16"):
        precision = "float16"
    if precision == "int4" and model == "smollm2":  # the shipped file has 4 bits
        return source
    file = FILES / f"{model if model == 'smollm2' else source.stem.rsplit('-', 1)[0]}-{precision}.gguf"
    if not file.exists():
        staging = file.with_suffix(".part")
        staging.unlink(missing_ok=True)
        rewrite(source, staging, precision)
        staging.rename(file)
    return file


def measure(model: str, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all variants of a model."""
    missing: dict[str, str] = {}
    running: dict[str, Running] = {}
    with tempfile.TemporaryDirectory() as scratch:
        try:
            for variant in VARIANTS:
                package = PACKAGES.get(variant.way)
                if package is not None and importlib.util.find_spec(package) is None:
                    missing[variant.name] = f"{package} is not installed: pip install 'hidet_dist[bench-llm]'"
                elif variant.way == "transformers" and given.precision != "float32":
                    missing[variant.name] = "it is measured in float32 alone"
                elif given.only and variant.name not in given.only and variant.way not in given.only:
                    continue
                else:
                    try:
                        file = file_of(model, variant, given.precision, given.parameters)
                        errors = Path(scratch) / "errors"
                        if variant.way == "ours":  # the first start builds
                            start(variant, file, given.precision, errors).end()
                        running[variant.name] = start(variant, file, given.precision, errors)
                    except RuntimeError as error:
                        missing[variant.name] = str(error)
            for turn in range(-1, given.rounds):
                for one in running.values():
                    told = {
                        "prefill_ms": 1e3 * one.ask("prefill", PROMPT)["seconds"],
                        "prefill_long_ms": 1e3 * one.ask("prefill", LONG)["seconds"],
                    }
                    for name, sequences in (("decode", 1), ("decode_batch", BATCH)):
                        of = one.ask("decode", sequences, PROMPT, given.new)
                        told[f"{name}_tokens_per_second"] = of["tokens"] / of["seconds"]
                    if turn >= 0:  # the first turn warms up
                        for name, value in told.items():
                            one.note(name, value)
        finally:
            for one in running.values():
                one.end()
    for name, reason in missing.items():
        console.print(f"{name}: not measured: {reason}", markup=False)
    medians = {
        name: {"first_token_s": one.first_seconds, **{key: statistics.median(x) for key, x in one.times.items()}}
        for name, one in running.items()
    }
    return {"variants": medians, "over_best_peer": ratios(medians), "missing": missing}


def ratios(medians: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    """Divide what was measured of ours by the best of the peers: times below 1, and rates above 1, are better."""
    peers = [of for name, of in medians.items() if not name.startswith("ours")]
    found: dict[str, dict[str, float]] = {}
    for name, of in medians.items():
        if name.startswith("ours") and peers:
            found[name] = {
                key: value / (max if key.endswith("per_second") else min)(peer[key] for peer in peers)
                for key, value in of.items()
            }
    one, two = medians.get("ours, 1 x 1 threads"), medians.get("ours, 2 x 1 threads")
    wide = medians.get("ours, 1 x 2 threads")
    for name, more in (("two ranks over one thread", two), ("two threads over one", wide)):
        if one is not None and more is not None:
            found[name] = {key: more[key] / one[key] for key in one if key.endswith("per_second")}
    return found


def show(console: Console, title: str, result: dict[str, Any]) -> None:
    """Print a table of medians, and one of ratios."""
    headings = {
        "prefill_ms": f"prefill {PROMPT}, ms",
        "prefill_long_ms": f"prefill {LONG}, ms",
        "decode_tokens_per_second": "decode, tokens/s",
        "decode_batch_tokens_per_second": f"decode of {BATCH}, tokens/s",
        "first_token_s": "first token, s",
    }
    for kind, rows in ((title, result["variants"]), ("over the best peer", result["over_best_peer"])):
        table = Table("", *headings.values(), title=kind)
        for name, of in rows.items():
            table.add_row(name, *(f"{of[key]:.2f}" if key in of else "" for key in headings))
        console.print(table)


def publish(result: dict[str, Any], out: Path | None) -> None:
    """Print a result as a line of JSON, and write it to a file if one is given."""
    text = json.dumps(result)
    if out is not None:
        write_text(out, text + "\n")
    print(text)


def main() -> None:
    """Measure, and print tables and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--precision", choices=PRECISIONS, default="float32")
    parser.add_argument("--parameters", type=float, default=5e8, help="of the random model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new", type=int, default=128, help="tokens that are generated in each call")
    parser.add_argument("--only", nargs="*", help="names of variants, or of ways, to take")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    console = Console(width=130)
    result: dict[str, Any] = {"machine": describe(), "precision": given.precision, "new": given.new, "models": {}}
    for model in given.models:
        result["models"][model] = measure(model, given, console)
        show(console, f"{model}, {given.precision}", result["models"][model])
    publish(result, given.out)


if __name__ == "__main__":
    main()
