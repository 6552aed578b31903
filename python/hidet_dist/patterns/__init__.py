"""Patterns of several operators that a target computes by one kernel."""
