"""Compilers outside of Python: where they are, and whether they work."""
