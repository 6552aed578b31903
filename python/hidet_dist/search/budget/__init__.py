"""The search within a memory budget: prices, frontiers, parts and integer programs, and the refusal of budgets."""
