"""The commands of ``hidet-dist`` that serve language models.

They are apart from the others, so that a model that was built is served without the machines and options of planning.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hidet_dist.cli.failures import errors
from hidet_dist.cli.parameters import taking

if TYPE_CHECKING:
    from hidet_dist.cli.language_models import LoadingOptions

LanguageModelPath = Annotated[
    Path,
    typer.Argument(
        help="A transformers folder, a GGUF file, or the folder of a built language model.", metavar="MODEL"
    ),
]
Ranks = Annotated[int | None, typer.Option("-n", help="Ranks to start on this machine; 1 by default.")]
Stages = Annotated[
    int, typer.Option(help="Stages of whole layers, each on ranks of its own; with several hosts, such as one a host.")
]
Context = Annotated[
    int | None, typer.Option(help="Tokens of a sequence, its prompt included; by default the model's, at most 4096.")
]
ElementType = Annotated[
    str | None, typer.Option("--dtype", help="float32, float16 or bfloat16; float32 by default.", show_default=False)
]
Machine = Annotated[
    str | None, typer.Option(help="The machine to plan for: one of `hidet-dist machines`, or a machine file (.json).")
]
Cache = Annotated[Path | None, typer.Option(help="The folder of built models; ~/.cache/hidet_dist/models by default.")]
MaxTokens = Annotated[
    int | None, typer.Option(help="Tokens of an answer, at most; by default as many as the context has room for.")
]
Temperature = Annotated[float, typer.Option(help="The temperature of sampling; 0 takes the most probable token.")]
TopP = Annotated[float, typer.Option(help="Sample among the most probable tokens of this probability together.")]
Seed = Annotated[int | None, typer.Option(help="The seed of sampling; by default another one each time.")]


def serve(
    model: LanguageModelPath,
    ranks: Ranks = None,
    stages: Stages = 1,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="The model's name in requests; that of its file by default.")] = None,
    context: Context = None,
    sequences: Annotated[
        int | None, typer.Option(help="Sequences that run at once; 8 by default.", show_default=False)
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Tokens of a step, at most; 256 by default.", show_default=False)
    ] = None,
    cached_tokens: Annotated[
        int | None, typer.Option(help="Tokens whose keys and values are kept; 4 contexts by default.")
    ] = None,
    dtype: ElementType = None,
    machine: Machine = None,
    cache: Cache = None,
    timeout: Annotated[
        float | None, typer.Option(help="Seconds that ranks wait for one another; 60 by default.", show_default=False)
    ] = None,
    nnodes: Annotated[int, typer.Option(help="The number of hosts; start the command on each of them.")] = 1,
    node_rank: Annotated[int | None, typer.Option(help="The number of this host, from 0, which serves.")] = None,
    rdzv: Annotated[str | None, typer.Option(help="An address and port of host 0, such as 10.0.0.1:29500.")] = None,
    queue: Annotated[int, typer.Option(help="Answers that may wait; requests past them are refused.")] = 256,
    drain: Annotated[float, typer.Option(help="Seconds that requests may run on after a signal to stop.")] = 30.0,
) -> None:
    """Serve a language model by OpenAI's interface. An API key is taken from HIDET_DIST_API_KEY."""
    with errors():
        from hidet_dist.cli.language_models import LoadingOptions
        from hidet_dist.cli.language_models import serve as command
        from hidet_dist.llm.loading import Hosts

        sizes = {"sequences": sequences, "step_tokens": step_tokens, "cached_tokens": cached_tokens}
        given = {
            "ranks": ranks,
            "stages": stages,
            "context": context,
            "dtype": dtype,
            "timeout_seconds": timeout,
            **sizes,
        }
        loading = LoadingOptions(model, cache, given, machine, Hosts(nnodes, node_rank, rdzv))
        raise typer.Exit(command(loading, name, host, port, drain, queue))


@dataclass(frozen=True)
class Answering:
    """What commands that answer take: how the model is loaded, how tokens are chosen, and how many at most."""

    loading: LoadingOptions
    choosing: dict[str, Any]
    max_tokens: int | None


def _answering(
    model: LanguageModelPath,
    ranks: Ranks = None,
    stages: Stages = 1,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = None,
    context: Context = None,
    dtype: ElementType = None,
    machine: Machine = None,
    cache: Cache = None,
) -> Answering:
    from hidet_dist.cli.language_models import LoadingOptions

    given = {"ranks": ranks, "stages": stages, "context": context, "dtype": dtype}
    choosing = {"temperature": temperature, "top_p": top_p, "seed": seed}
    return Answering(LoadingOptions(model, cache, given, machine), choosing, max_tokens)


_answers = taking(
    inspect.signature(_answering, eval_str=True).parameters.values(),
    lambda values: _answering(**values),
)


@_answers
def generate(
    answering: Answering,
    prompt: Annotated[str, typer.Argument(help="What to answer.", metavar="PROMPT")],
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without a chat template.")] = False,
) -> None:
    """Answer a prompt with a language model, and print tokens as they come."""
    with errors():
        from hidet_dist.cli.language_models import generate as command

        command(answering.loading, prompt, raw, answering.choosing, answering.max_tokens)


@_answers
def chat(
    answering: Answering,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first message.")] = None,
) -> None:
    """Answer messages, one a line of the standard input, until it ends."""
    with errors():
        from hidet_dist.cli.language_models import chat as command

        command(answering.loading, system, answering.choosing, answering.max_tokens)


COMMANDS: Mapping[str, Callable[..., None]] = {"serve": serve, "generate": generate, "chat": chat}
"""The commands by their names."""
