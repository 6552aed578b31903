"""Sharding rules: which shardings each operator admits, derived from its own compute definition."""
