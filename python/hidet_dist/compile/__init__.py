"""Compile: from a program to kernels and a launch function, built once for all ranks."""

from hidet_dist.compile.backend import Backend
from hidet_dist.compile.build import CompiledProgram, compile_program, optimize_program
from hidet_dist.compile.targets import backend_of

__all__ = ["Backend", "CompiledProgram", "backend_of", "compile_program", "optimize_program"]
