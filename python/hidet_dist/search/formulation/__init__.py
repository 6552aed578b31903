"""From a graph to the problem that solvers take, and from its solution to a plan: choices, memory, pins."""
