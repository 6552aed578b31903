"""Building: from a checkpoint to the artifacts of the program that computes a step, for a number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hidet.graph import FlowGraph

from hidet_dist.api import auto_parallel, build_traced
from hidet_dist.errors import ConfigError
from hidet_dist.frontends.pytorch.module import from_torch
from hidet_dist.llm import ragged_encoder
from hidet_dist.llm.chat import ChatTemplate
from hidet_dist.llm.checkpoint import Checkpoint, blaming
from hidet_dist.llm.options import LoadOptions
from hidet_dist.llm.pooling import Pooling, longest_text
from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle
from hidet_dist.llm.sizes import StepSizes
from hidet_dist.llm.stored import StoredModel
from hidet_dist.llm.tokenizer import CheckpointTokenizer
from hidet_dist.phases.values import Prepared, Traced
from hidet_dist.pipeline.state_cuts import stages_between_states
from hidet_dist.weights.panels import STORED


def build(path: Path, name: str, options: LoadOptions, folder: Path) -> None:
    """Build a checkpoint for the ranks and sizes of ``options``.

    The model is traced over ragged tokens, with all sizes of a step symbolic. Several stages are cut between the pools
    of its layers. The plan is the best for a step in which each of the sequences that run at once decodes a token, with
    half of its context filled; that of an encoder, for a step full of texts.

    Parameters
    ----------
    path: Path
        The checkpoint, as :meth:`Checkpoint.open` takes it.
    name: str
        The name of the model.
    options: LoadOptions
        The options, checked.
    folder: Path
        An empty folder for the model.

    Raises
    ------
    ConfigError, WeightsError, TraceError, UnsupportedModelError
        When the checkpoint is malformed, or of a model that is not served; the message says why.
    HidetDistError
        As :func:`hidet_dist.auto_parallel`.
    """
    checkpoint = Checkpoint.open(path)
    if checkpoint.is_encoder:
        _build_encoder(checkpoint, name, options, folder)
        return
    tokenizer = checkpoint.tokenizer()
    _check_template(tokenizer)
    context = 0

    def prepared(config: Any) -> None:
        nonlocal context
        context = options.context_of(getattr(config.get_text_config(), "max_position_embeddings", None))
        prepare(config, context)

    module, weights = checkpoint.module(options.dtype, prepared)
    pages = options.pages_of(context)
    stored = {f"module.{name}": weight for name, weight in weights.items()}
    with blaming(checkpoint.configuration):
        settle(module)
        step = RaggedModel(module, pages * options.page, options.page, device="meta")
        graph = from_torch(step, step.inputs(), dynamic_shapes(), stored=stored)
    vocabulary = int(graph.outputs[0].shape[1])
    if tokenizer.vocabulary > vocabulary:
        raise ConfigError(f"{path} has a tokenizer of {tokenizer.vocabulary} tokens, and logits of {vocabulary} alone.")
    sizes = StepSizes(vocabulary, context, pages, options.page, options.sequences, options.step_tokens)
    sequences = min(options.sequences, options.step_tokens)
    symbols = {
        "tokens": sequences,
        "sequences": sequences,
        "pages": max(1, context // (2 * options.page)),
        "wanted": sequences,
    }
    distributed = {**options.distributed, "mesh_shape": [options.rank_count]}
    optimization = {"symbols": symbols, **options.optimization}
    if checkpoint.is_quantized and options.dtype == "float32":
        optimization = _with_weights_as_stored(graph, distributed, optimization)
    if options.stages > 1 and "stages" in optimization:
        raise ConfigError("optimization has stages, and their number is given, too: leave one of the two out.")

    def cut(whole: Prepared) -> Prepared:
        return whole.with_stages(stages_between_states(whole.graph, whole.view.symbols, options.ranks_of_stages))

    traced = Traced.of(graph, distributed, optimization)
    build_traced(traced, StoredModel.artifacts_in(folder), changed=cut if options.stages > 1 else None)
    StoredModel.write(folder, name, sizes, tokenizer)


def _check_template(tokenizer: CheckpointTokenizer) -> None:
    """Raise ConfigError for a malformed chat template. Without Jinja it is not known, and no chat is possible."""
    if tokenizer.chat_template is not None:
        with suppress(ImportError):
            ChatTemplate(tokenizer.chat_template, tokenizer.special_texts)


def _with_weights_as_stored(
    graph: FlowGraph, distributed: Mapping[str, Any], optimization: Mapping[str, Any]
) -> dict[str, Any]:
    """Ask for the weights of products in the bits of their files, unless their precision is given, where that is known.

    A file of 4 bits would be eight times as large in float32.
    """
    weights = optimization.get("weights") or {}
    is_open = isinstance(weights, Mapping) and "precision" not in weights
    if is_open and STORED in Traced.of(graph, distributed, optimization).target.record.stored_precisions:
        return {**optimization, "weights": {**weights, "precision": STORED}}
    return dict(optimization)


def _build_encoder(checkpoint: Checkpoint, name: str, options: LoadOptions, folder: Path) -> None:
    """Build an encoder of texts, as :func:`build`."""
    if options.stages > 1:
        raise ConfigError(f"{checkpoint.path} is an encoder, which keeps no states to cut between: leave stages out.")
    tokenizer = checkpoint.tokenizer()
    module, weights = checkpoint.module(options.dtype, ragged_encoder.prepare)
    first = ragged_encoder.first_position(module)
    trained = getattr(module.config, "max_position_embeddings", None)
    most = [longest for longest in (longest_text(checkpoint.path), trained and trained - first) if longest]
    context = options.context_of(min(most, default=None))
    tokens = max(options.step_tokens, context)
    stored = {f"module.{name}": weight for name, weight in weights.items()}
    with blaming(checkpoint.configuration, is_encoder=True):
        encoder = ragged_encoder.RaggedEncoder(module)
        graph = from_torch(encoder, encoder.inputs(), ragged_encoder.dynamic_shapes(), stored=stored)
    pooling = Pooling.of_folder(checkpoint.path, int(graph.outputs[0].shape[1]))
    vocabulary = module.get_input_embeddings().num_embeddings
    if tokenizer.vocabulary > vocabulary:
        raise ConfigError(
            f"{checkpoint.path} has a tokenizer of {tokenizer.vocabulary} tokens, and a model of {vocabulary}."
        )
    sizes = StepSizes(vocabulary, context, tokens, 1, options.sequences, tokens, shares_prefixes=False)
    symbols = {"tokens": tokens, "sequences": min(options.sequences, tokens), "columns": context}
    distributed = {**options.distributed, "mesh_shape": [options.rank_count]}
    auto_parallel(graph, distributed, {"symbols": symbols, **options.optimization}, StoredModel.artifacts_in(folder))
    StoredModel.write(folder, name, sizes, tokenizer, pooling)
