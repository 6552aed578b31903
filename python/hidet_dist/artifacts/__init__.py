"""Artifacts: the folder that a build writes and serving processes load (JSON, safetensors, shared libraries).

::

    manifest.json                     the files, with the size and SHA-256 of each; written last
    weights/rank0.safetensors ...     the weight shards and the coordinate of each rank, for all programs
    kernels/<sha256>.so ...           the kernels of all stages and programs, equal ones once
    plan.json                         the plan
    explain.json                      the explanation of the plan
    report.json                       the data that `hidet-dist report` draws
    stage0/launcher.so                the function that launches all kernels of the stage's program
    stage0/constants.safetensors      constants that all ranks share (absent when there are none)
    choices/                          the fastest candidates of kernels on a kind of GPU; added when they are timed

Artifacts of several programs have the files from ``plan.json`` to ``stage0/`` in a folder for each:
``programs/<name>/plan.json`` and so on.
"""

from hidet_dist.artifacts.manifest import KernelLaunch, Manifest, ProgramManifest, StageManifest, TensorSignature

__all__ = ["KernelLaunch", "Manifest", "ProgramManifest", "StageManifest", "TensorSignature"]
