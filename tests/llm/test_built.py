"""Models over ragged tokens as programs that keep their pools: real ranks compute the logits of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.end_to_end.conftest import launch
from tests.llm.gguf_made import model_of
from tests.llm.test_ragged import PAGE, PAGES, Sequences, made

import hidet_dist
from hidet_dist.llm.ragged import RaggedModel, dynamic_shapes, prepare, settle

# A prompt, another one's first chunk beside it, its rest beside decoding, then decoding of both and of one.
STEPS = ({0: 9, 1: 4}, {1: 7, 0: 1}, {0: 1, 1: 1}, {1: 1, 0: 1}, {0: 1}, {1: 3})


THREE_HEADS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "shares"), [(1, ()), (2, ()), (2, (1, 2))])
def test_steps_of_a_built_model_find_the_rows_of_the_steps_before(ranks: int, shares: tuple[int, ...], tmp_path: Path):
    """On two ranks the budget has no room for all pools and weights, so that heads are split."""
    model = model_of("llama", head_dim=16, **THREE_HEADS) if shares else made("llama")
    config = type(model.config).from_dict(model.config.to_dict())
    prepare(config)
    module = type(model)(config).eval().float()
    module.load_state_dict(model.state_dict())
    settle(module)
    step = RaggedModel(module, PAGES * PAGE, PAGE, device="meta")
    graph = hidet_dist.from_torch(step, step.inputs(), dynamic_shapes=dynamic_shapes())
    options = {"symbols": {"tokens": 4, "sequences": 2, "pages": 6, "wanted": 2}}
    if ranks > 1:
        options["mem_budget"] = int((0.9 if shares else 0.7) * sum(x.numel() * 4 for x in model.parameters()))
        options |= {"input_specs": ["(R)"] * 5 + ["(R, R)", "(R)"], "output_specs": ["(R, R)"]}
    mesh = {"mesh_shape": [ranks], **({"shares": {"axis0": shares}} if shares else {})}
    hidet_dist.auto_parallel(graph, mesh, options, tmp_path / "built")

    generator = np.random.default_rng(1)
    sequences = Sequences(*(list(map(int, generator.integers(3, 90, 20))) for _ in range(2)))
    with torch.no_grad():
        whole = [model(input_ids=torch.tensor([tokens])).logits[0].numpy() for tokens in sequences.tokens]
    given, expected = {}, []
    for number, counts in enumerate(STEPS):
        given.update({f"{number}.{name}": x.numpy() for name, x in sequences.step(counts).items()})
        expected.append(np.stack([whole[one][sequences.done[one] - 1] for one in counts]))
    np.savez(tmp_path / "steps.npz", **given)
    script = Path(__file__).with_name("serve_ragged.py")
    done = launch(ranks, script, tmp_path / "built", tmp_path / "steps.npz", tmp_path)
    assert done.returncode == 0, done.stderr
    for rank in range(ranks):
        with np.load(tmp_path / f"rank{rank}.npz") as told:
            for number, logits in enumerate(expected):
                np.testing.assert_allclose(told[str(number)], logits, rtol=1e-5, atol=1e-5)
            heads = shares[rank] if shares else 2 // ranks
            assert tuple(told["shape.keys_0"]) == (PAGES * PAGE, heads, 16)
