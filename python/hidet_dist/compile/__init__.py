"""Compile: from a program to kernels and a launch function, built once however many ranks there are."""

from hidet_dist.compile.build import CompiledProgram, check_compiler, compile_program, optimize_program

__all__ = ["CompiledProgram", "check_compiler", "compile_program", "optimize_program"]
