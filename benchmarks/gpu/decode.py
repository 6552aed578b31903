"""A language model's steps on this machine's GPU, over pools of rows, beside transformers on the same GPU.

    make gpu-decode, or python -m benchmarks.gpu.decode [--precisions float16,int4] [--out benchmarks/results]

The model is a LLaMA of TinyLlama's sizes with random weights, in float16, or with the weights of its products in
``int8`` or ``int4``. Its peers are transformers' model in float16 with a static cache, eager, and by ``torch.compile``
in the mode ``reduce-overhead``, whose steps are CUDA graphs. All compute a prompt of one sequence, and steps of one
token of 1, 8 and 64 sequences with a context of 512 rows. A time is the median of calls, from tokens on the host to
logits on the host. The attention of a layer to the prompt is also compared with PyTorch's
``scaled_dot_product_attention``, which has the keys in one piece: both times are the device's. Each variant is a
process of its own (``build``, ``hidet``, ``torch``, ``attention``). The last line is JSON: the ratios to the faster
peer. Exits with 1 when a variant failed, and with 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, StaticCache

from benchmarks.serving.worker import burst
from hidet_dist.files import write_text
from hidet_dist.testing.sizes import TINY_LLAMA

PAGE, CONTEXT, PROMPT = 16, 512, 1024
LONGEST = 2048  # tokens of a sequence that the model has positions for
SEQUENCES = (1, 8, 64)
PAGES = max(SEQUENCES) * CONTEXT // PAGE
WARM_UP, CALLS = 5, 30
NO_GPU = 2
PLANNED = 8  # tokens of the step that the plan is for


def model(device: str) -> Any:
    """The model, its attention by PyTorch's kernels."""
    torch.manual_seed(0)
    sizes = TINY_LLAMA
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
    )
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float16).eval()


def build(precision: str, arch: str, out: str) -> None:
    """Build the step's program, run as a CUDA graph for each size."""
    import hidet_dist
    from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle

    whole = model("cpu")
    config = whole.config
    prepare(config, LONGEST)
    settle(whole)
    step = RaggedModel(whole, PAGES * PAGE, PAGE, device="meta")
    graph = hidet_dist.from_torch(step, step.inputs(), dynamic_shapes())
    symbols = {"tokens": PLANNED, "sequences": PLANNED, "pages": CONTEXT // PAGE, "wanted": PLANNED}
    options: dict[str, Any] = {"target": "cuda", "arch": arch, "cuda": {"cuda_graph": True, "cublas": True}}
    if precision != "float16":
        options["weights"] = {"precision": precision}
    result = hidet_dist.auto_parallel(graph, {"mesh_shape": [1]}, {**options, "symbols": symbols}, out)
    predicted = result.predicted_seconds
    print(json.dumps({"compile_seconds": result.compile_seconds, "predicted_seconds": predicted}))


def timed(call: Callable[[], Any]) -> float:
    """The median of the seconds of a call."""
    return statistics.median(burst(call, CALLS, WARM_UP))


def step_of(sequences: int, tokens: int, context: int, pages: np.ndarray) -> dict[str, Any]:
    """The inputs of a step in which each sequence has its last tokens computed, so many of each."""
    rng = np.random.default_rng(0)
    at = np.tile(np.arange(context - tokens, context), sequences)
    own = np.repeat(np.arange(sequences), tokens)
    return {
        "tokens": rng.integers(0, TINY_LLAMA.vocabulary, len(at)),
        "positions": at,
        "slots": pages[own, at // PAGE] * PAGE + at % PAGE,
        "sequences": own,
        "lengths": at + 1,
        "table": pages[:sequences],
        "wanted": np.arange(1, sequences + 1) * tokens - 1,
    }


def hidet(artifacts: str) -> dict[str, Any]:
    """Time the program's steps, and the longest kernels of each."""
    import hidet_dist

    cases = {f"decode_{count}": (count, 1, CONTEXT) for count in SEQUENCES} | {"prefill": (1, PROMPT, PROMPT)}
    found: dict[str, Any] = {}
    with hidet_dist.load_partition(artifacts) as partition:
        for case, (sequences, tokens, context) in cases.items():
            pages = np.random.default_rng(0).permutation(PAGES).reshape(-1, context // PAGE)
            inputs = step_of(sequences, tokens, context, pages)
            found[case] = timed(partial(partition, **inputs))
            found[f"kernels_{case}"] = profiled = kernels(partition.profile(**inputs))
            attention = [own for own in profiled if own[0].startswith("RowAttention ")]
            if case == "prefill" and attention:
                found["attention"] = sum(own[2] for own in attention) / sum(own[1] for own in attention)
        found["device_bytes"] = partition.device_bytes
    return found


def kernels(profile: Any) -> list[tuple[str, int, float]]:
    """The longest kernels: names, how often they run, and their seconds together."""
    together: dict[str, list[float]] = {}
    for operator in profile.operators:
        together.setdefault(f"{operator.name} {operator.output}", []).append(operator.seconds)
    return sorted(((name, len(own), sum(own)) for name, own in together.items()), key=lambda one: -one[2])[:12]


def peer(mode: str, device: str = "cuda") -> dict[str, Any]:
    """Time the steps of transformers' model."""
    whole = model(device)
    found = {}
    run = torch.compile(whole, mode=mode) if mode != "eager" else whole
    with torch.inference_mode():
        for count in SEQUENCES:
            cache = StaticCache(config=whole.config, max_cache_len=CONTEXT)
            # Each step is one row further, and attends to all rows of the cache.
            rows = CONTEXT - WARM_UP - CALLS
            prompt = torch.randint(0, TINY_LLAMA.vocabulary, (count, rows), device=device)
            whole(input_ids=prompt, past_key_values=cache, logits_to_keep=1)
            tokens = torch.randint(0, TINY_LLAMA.vocabulary, (count, 1))

            def step(tokens: torch.Tensor = tokens, cache: Any = cache) -> torch.Tensor:
                logits: torch.Tensor = run(input_ids=tokens.to(device), past_key_values=cache).logits
                return logits.float().cpu()

            found[f"decode_{count}"] = timed(step)
        prompt = torch.randint(0, TINY_LLAMA.vocabulary, (1, PROMPT))
        found["prefill"] = timed(lambda: whole(input_ids=prompt.to(device), logits_to_keep=1).logits.float().cpu())
    return found


def attention() -> dict[str, Any]:
    """Time PyTorch's attention of a layer to the prompt, by events of the device."""
    sizes = TINY_LLAMA
    size = sizes.hidden // sizes.heads
    query, key, value = (
        torch.randn(1, heads, PROMPT, size, device="cuda", dtype=torch.float16)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    seconds = []
    for _ in range(WARM_UP + CALLS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        end.record()
        end.synchronize()
        seconds.append(1e-3 * begin.elapsed_time(end))
    return {"attention": statistics.median(seconds[WARM_UP:])}


VARIANTS: dict[str, Callable[..., dict[str, Any]]] = {"hidet": hidet, "torch": peer, "attention": attention}


def variant(*arguments: str, seconds: float = 300.0) -> dict[str, Any] | None:
    """What a process of this program found; None if it failed."""
    command = [sys.executable, "-m", "benchmarks.gpu.decode", *arguments]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=seconds, check=True)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{' '.join(arguments)}: {error}", file=sys.stderr)
        return None
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    times = {name: f"{1e3 * own:.3f} ms" for name, own in found.items() if isinstance(own, float)}
    print(" ".join(arguments), times, file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Run all variants, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", default="float16,int4")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU, nothing was measured", file=sys.stderr)
        return NO_GPU
    major, minor = torch.cuda.get_device_capability()
    found: dict[str, dict[str, Any] | None] = {}
    with tempfile.TemporaryDirectory(prefix="hidet_dist-decode-") as folder:
        for precision in options.precisions.split(","):
            out = str(Path(folder) / precision)
            built = variant("build", precision, f"sm_{major}{minor}", out)
            own = variant("hidet", out) if built is not None else None
            found[f"hidet_{precision}"] = None if built is None or own is None else {**built, **own}
    for mode in ("eager", "reduce-overhead"):
        found[f"torch_{mode}"] = variant("torch", mode)
    found["attention"] = alone = variant("attention")
    peers = [own for name, own in found.items() if name.startswith("torch_") and own is not None]
    cases = [*(f"decode_{count}" for count in SEQUENCES), "prefill"]
    ratios = {
        f"{name}_{case}": own[case] / min(peer[case] for peer in peers)
        for name, own in found.items()
        if own is not None and name.startswith("hidet_") and peers
        for case in cases
    }
    if alone is not None:
        ratios |= {
            f"{name}_attention": own["attention"] / alone["attention"]
            for name, own in found.items()
            if own is not None and name.startswith("hidet_") and "attention" in own
        }
    text = json.dumps({"gpu": torch.cuda.get_device_name(), "found": found, "ratios": ratios}, indent=1)
    write_text(options.out / f"gpu-decode-{torch.cuda.get_device_name().replace(' ', '-').lower()}.json", text)
    print(json.dumps(ratios))
    return 1 if None in found.values() else 0


if __name__ == "__main__":
    do, *arguments = sys.argv[1:] or [""]
    if do == "build":
        build(*arguments)
    elif do in VARIANTS:
        print(json.dumps(VARIANTS[do](*arguments)))
    else:
        sys.exit(main())
