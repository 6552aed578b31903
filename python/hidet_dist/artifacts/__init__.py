"""Artifacts: the folder that a build writes and serving processes load (JSON, safetensors, shared libraries).

::

    manifest.json                     the files, with the size and SHA-256 of each; written last
    plan.json                         the plan
    explain.json                      the explanation of the plan
    report.json                       the data that `hidet-dist report` draws
    stage0/launcher.so                the function that launches all kernels of the stage's program
    stage0/kernels/0.so ...           its kernels, the same for every rank
    stage0/constants.safetensors      constants that all ranks share (absent when there are none)
    stage0/rank0.safetensors ...      the weight shards and the coordinate of each rank
    choices/                          the fastest candidates of kernels on a kind of GPU; added when they are timed
"""

from hidet_dist.artifacts.manifest import Launch, Manifest, StageManifest, TensorSignature

__all__ = ["Launch", "Manifest", "StageManifest", "TensorSignature"]
