"""Graphs with symbolic dims: planning one program for all sizes."""
