"""The cost model: seconds of operators, conversions and collectives, shared by search, overlap and reports."""
