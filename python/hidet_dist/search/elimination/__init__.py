"""Variable elimination: exact without a budget, a bound and plans with prices on memory."""
