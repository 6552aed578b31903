"""Artifacts: the folder that a build leaves and serving processes load. JSON, safetensors, shared libraries; no pickle.

::

    manifest.json                     what there is, with the size and SHA-256 of every file; written last
    plan.json                         the plan
    stage0/launcher.so                the function that launches the whole program
    stage0/kernels/0.so ...           its kernels, the same for every rank
    stage0/constants.safetensors      constants that every rank shares (absent when there are none)
    stage0/rank0.safetensors ...      each rank's weight shards and coordinate
"""

from hidet_dist.artifacts.manifest import Launch, Manifest, StageManifest, TensorSignature

__all__ = ["Launch", "Manifest", "StageManifest", "TensorSignature"]
