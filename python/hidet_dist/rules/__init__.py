"""Sharding rules: the shardings that each operator admits, derived from its compute definition."""
