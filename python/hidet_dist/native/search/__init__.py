"""Typed Python bindings of the native solvers: planning uses them, serving does not."""
