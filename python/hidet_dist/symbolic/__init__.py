"""Graphs with symbolic dims: their sizes as expressions, and planning before the sizes are known."""
