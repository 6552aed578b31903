"""Overlap: communication that runs beside computation."""
