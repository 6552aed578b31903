#!/usr/bin/env bash
# Packs all-MiniLM-L6-v2 for an offline machine with a GPU, from the root of a checkout where .venv has its package:
# into .gpu-models/, in float16, 45 MB, which git ignores. Where no more than 64 MiB can be carried at a time, carry it
# before .gpu/ and leave it there as ~/minilm; run.sh takes it from either place. Without it the checks take random
# weights of its shapes.
set -euo pipefail
.venv/bin/python - <<'P'
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from hidet_dist.testing.minilm import minilm_dir

out = Path(".gpu-models/minilm")
out.mkdir(parents=True, exist_ok=True)
weights = load_file(minilm_dir() / "model.safetensors")
half = {name: x.half() if x.is_floating_point() else x for name, x in weights.items()}
save_file(half, out / "model.safetensors", metadata={"format": "pt"})
shutil.copyfile(minilm_dir() / "config.json", out / "config.json")
P
du -sh .gpu-models
