"""Sharding rules of operators: the shardings that each admits, derived from its compute definition."""
