"""Tuning constants of the search, which trade the time and the memory of planning for how near plans come to the best.

None of them changes what is a plan or what is proven of it. They were chosen on the graphs of ``benchmarks/search.py``.
"""

# Presolve (presolve.py).
PRESOLVE_ROUNDS = 3  # over all entities; later ones remove little

# Ties (ties.py, optimum.py).
TIE_SHARE = 1e-3  # of the gap that the charges of all collectives, or those of memory, may come to

# Coordinate descent (descent.py).
DESCENT_STEPS = 20_000  # entities looked at
ROUNDING = 1e-12  # relative, of sums of seconds; a choice that is better by less is none

# Elimination (eliminate.py).
TENSOR_ENTRIES = 2**22  # of the table of one tensor; above it, the tensor is relaxed
READERS_LIMITS = (3, 8, 2, 1)  # tensors of more readers are relaxed; tried in this order until the gap is small
WORK_LIMIT = 2**29  # additions of one step of an elimination; above it, the graph is too wide to be eliminated
WIDE_WORK = 2**20  # additions of one step above which another order of elimination is tried
MARGINAL_LIMIT = 2**25  # additions of one step of the backward pass
SHARED_SPECS = 1.5  # choices a spec from which on a variable for the spec makes the tables smaller
CHUNK_ENTRIES = 2**22  # of an array of intermediate results
COST_BITS = 50  # of the sum of all that can be paid; lower digits are cut off, so that sums are exact
PRICE_BITS = 24  # of the greatest price; lower digits are cut off
TABLES_KEPT = 0.5  # share of the memory limit above which the tables of earlier eliminations are dropped

# Prices and mixtures (optimum.py).
PROBES = 60  # prices tried at most; a dozen is usual
PRICE_RAISES = 4  # raises of the limit on prices before plans that hold less are looked for, whatever they cost
PLAN_BY_SHARE = 0.5  # share of the time after which plans that hold less are looked for, too, if none fits so far
REFUSAL_SHARE = 0.25  # of the time that may be taken to name the least of a budget that is known to be too small
PEAK_SPREAD = 0.02  # of the prices for the least peak: where memory is free, plans would waste it
PEAK_GAP = 0.01  # between the least peak known and its bound, above which more plans are looked for
PEAK_RISES = 6  # of the prices of points that exceed what is aimed at
PEAK_RISE = 0.05  # of the sum of all prices, for the point that exceeds it most
PEAK_RISE_GROWTH = 1.15
PRICE_RAISE = 8.0  # factor of one raise
FIRST_PRICE_PARTS = 20  # one in so many of the seconds of the plan without a budget is the first limit on prices
EQUAL = 1e-6  # relative difference of seconds, at prices of so many digits, that is none
PRICE_FACTORS = (0.25, 0.5, 0.7, 0.85, 1.2, 1.4, 2.0, 4.0)  # of the best prices, for more plans to recombine
KNOWN_PLANS = 40  # plans that a like problem is begun with

# Windows of operators that are planned anew (optimum.py).
WINDOW = 80  # operators to each side of the middle
WINDOWS = 24  # replanned at most
WINDOW_PRICES = (1.0, 0.7, 0.4)  # factors of the best prices, where there is room for more

# Recombination, and what is left to the integer program (optimum.py, ilp.py).
RECOMBINED_PLANS = 16
RECOMBINATION_NODES = 200
ROUGH_GAP = 0.01  # of a recombination that only drops choices before the integer program decides on the others
NEAR_BUDGET = 0.95  # of the budget: points that hold more may exceed it in a plan better than the best one known
FEW_CHOICES = 2500  # that the integer program decides on within a minute
VERY_FEW_CHOICES = 300  # that it decides on at once
NODES = 5000  # of a solver's search tree; a good plan is known by then, and proving more takes hours
POINTS_AT_ONCE = 30  # program points that get a row in one round
ROW_TOLERANCE = 1e-6  # relative, by which solvers allow a row to be exceeded
VARIABLE_BYTES = 3000  # of a variable in PuLP and HiGHS; with the next figure 0.95 to 1.4 times what was measured
TERM_BYTES = 500  # of a variable in a row

# Overlap of communication with computation (overlap.py).
OVERLAP_ROUNDS = 4
OVERLAP_CHOICES = 20_000  # of all entities, up to which the problem is solved again in earnest
OVERLAP_GAP = 0.01  # at which that may stop: the time that is hidden is known no better
OVERLAP_SHARES = 8  # shares of a collective's time are whole eighths, so that equal layers come out equal

# Finer meshes (planner.py).
GIVEN_MESH_SHARE = 0.6  # of the time left that the given mesh may take before a finer one is tried
