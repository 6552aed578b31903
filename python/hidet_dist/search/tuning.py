"""Tuning constants of the search: they trade the time and the memory of planning for the quality of plans.

None of them affects whether a plan is right, or its bound valid. They were chosen on ``benchmarks/search.py``'s graphs.
"""

# Presolve (presolve.py).
PRESOLVE_ROUNDS = 3  # over all entities; later ones remove little

# The whole search (in_time.py).
FORMULATION_FRACTION = 0.6  # of the time limit, after which a simpler problem is formulated
REPLICATED_FRACTION = 0.1  # of a short time, until which plans of replicated operators are improved
FEW_FRACTION = 0.6  # of it, until which those of few choices are
FEW_OVERRUN = 2.0  # times that time, until which few choices are formulated where there is a replicated plan
SHORT_KIND_SECONDS = 0.2  # for each unlike operator: few choices come first where there is less, as all may take longer
LEAST_FORMULATION_SECONDS = 2e-4  # for an operator: no large graph takes less, and it is not begun where there is less
JUDGED_FRACTION = 0.2  # of a part's time, after which its pace is judged (limits.py)
HOPELESS = 2.0  # times its time that a part takes at its pace, above which it is given up

# Graphs that share weights (family.py).
JOINT_FRACTION = 0.5  # of the time that is left, for the joint problem where candidates may follow it

# Ties (ties.py, relaxation.py).
TIE_FRACTION = 1e-3  # of the gap that the charges of all collectives, or those of memory, may come to

MOST_NEAR_EVEN = 3  # lists of near-even parts of heads that are offered for an axis

MOST_LIMITING_DEVICES = 8  # devices of unlike shards or budgets whose memory is counted one by one

# Shares of an axis of unequal devices (shares.py).
MOST_PARTS = 64  # the greatest sum of shares that is proposed
WEIGHTS_FRACTION = 0.8  # of a device's memory that weights may fill before shares in proportion to memory are proposed
PROPOSALS = 3  # meshes with shares that are searched, besides the even one

# Coordinate descent (descent.py).
DESCENT_STEPS = 20_000  # entities looked at
ROUNDING = 1e-12  # relative, of sums of seconds; a choice that is better by less is none

# Elimination (eliminate.py).
JOINT_ENTRIES = 2**16  # entries of the table of a joint peak, above which points keep prices of their own
JOINT_WORK = 2.0  # factor of the work of a step that joint peaks may come to
JOINT_POINTS = 6  # program points from the first to the last of a joint peak, at most
TENSOR_ENTRIES = 2**22  # entries of the table of one tensor, above which the tensor is relaxed
READERS_LIMITS = (3, 8, 2, 1)  # open readers of a tensor above which it is relaxed; tried in turn until exact enough
PAIRED_WORK = 2**23  # additions of an elimination, up to which relaxed conversions are shared from each source spec
PAIRED_FACTOR = 4.0  # times the additions without, up to which they are, too
PAIRED_MOST = 2**28  # additions up to which they are where a gap is left
TIGHT_WORK = 2**28  # additions of an elimination, up to which tensors are relaxed less where a gap is left
TIGHT_FRACTION = 0.01  # fraction of such a gap that a tensor's part of it must exceed
TIGHTENINGS = 4  # times in a search that such tensors are looked for
PORTION_ROUNDS = 8  # eliminations at most with portions towards those of a plan
PORTION_STEP = 0.1  # of the way to the portions of a plan, at least
PORTION_PROGRESS = 0.95  # fraction of the gap that must be left after one, at most
PORTION_STALLS = 2  # of them in a row that leave more, after which there are no more
NARROWINGS = 3  # kinds of tensors that are relaxed, beside those of many readers, where a graph is too wide without
EXACT_WORK = 2**26  # additions of one step above which plans are improved before more tensors are treated exactly
WORK_LIMIT = 2**29  # additions of one step of an elimination, above which the graph is too wide to be eliminated
WIDE_WORK = 2**20  # additions of one step above which another order of elimination is tried
ORDER_WORK = 8000  # additions, for each variable, that take as long as choosing an order
CHECK_STEPS = 8  # steps of an elimination, or entities of a presolve, from one look at the clock to the next
MARGINAL_LIMIT = 2**25  # additions of one step of the backward pass
SHARED_SPECS = 1.5  # choices per spec, above which a variable for the spec makes the tables smaller
CHUNK_ENTRIES = 2**18  # entries of an array of intermediate results, 2 MiB, which stay in a processor's cache
COST_BITS = 50  # bits of the greatest possible cost; lower bits are cut off, so that sums are exact
PRICE_BITS = 24  # bits of the greatest price; lower bits are cut off
TABLES_KEPT = 0.05  # fraction of the memory limit above which the tables of earlier eliminations are dropped

# Prices and mixtures (relaxation.py, least_memory.py, optimum.py).
PROBES = 60  # prices tried at most; a dozen is usual
PRICE_RAISES = 4  # raises of the limit on prices before the plan of least memory is searched, whatever its cost
PLAN_BY_FRACTION = 0.5  # of the time, after which, too, the plan of least memory is searched if none fits so far
REFUSAL_FRACTION = 0.25  # of the time, for finding the least budget, once the given one is known to be too small
PEAK_SPREAD = 0.02  # fraction of the prices that is spread over all points: where memory is free, plans waste it
PEAK_GAP = 0.0095  # fraction of the least peak so far that its bound may be below it in a refusal
REFUTED_GAP = 0.001  # fraction of a target up to which smaller targets that nothing reaches are told from others
PEAK_CHOICES = 300  # choices among which targets, or else the integer program, find the very least peak
PEAK_TARGETS = 12  # targets between the least peak so far and its bound that are tried
TARGET_REDUCTIONS = 4  # reductions of the choices to those that can reach a target
TARGET_PROBES = 5  # prices tried after each
TARGET_SHRINK = 0.97  # fraction of the choices that a reduction must go below, for another to be tried
FORBIDDEN_PEAKS = 10.0  # of a target: bytes that a conversion counts as with which no plan reaches it
PRICE_RAISE = 8.0  # factor of one raise of the limit on prices
FIRST_PRICE = 0.4  # fraction of the unbudgeted plan's seconds that a budget's worth of bytes costs at the first limit
PART_FIRST_PRICE = 0.05  # of a part of the plans: the fraction that the bytes beyond the budget cost at the first limit
FAR_GAP = 0.05  # of the best plan above a mixture: where nothing is proven, rough prices find as good plans
BOUND_FRACTION = 0.1  # of the gap, by which better prices must be able to raise the bound to be looked for
UNFIT_POINTS = 4  # program points at which choices are tested for whether any plan with them fits
EQUAL = 1e-6  # relative difference below which two priced costs count as equal
KNOWN_PLANS = 40  # plans from which the search of a similar problem starts

# Capacity (capacity.py).
CAPACITY_ROUNDS = 6  # over all entities; later ones remove little

# Parts of the plans (division.py).
FEW_WIDE_CHOICES = 600  # choices left, up to which the integer program decides about a wide graph sooner
DIVIDED_CHOICES = 13_000  # choices of all entities, up to which plans are divided into parts
DIVIDED_FIRST = 6000  # choices of all entities, up to which plans far from the bound are divided before anything else
DIVIDED_GAP = 0.03  # relative gap above which they are: frontiers would have too many labels
FRONTIER_GAP = 0.03  # relative gap of a part below which a frontier is tried
RESIDENT_RANGES = 8  # ranges of resident bytes that plans are divided by at first
PARTS = 60  # parts looked at
PART_CHOICES = 130_000  # choices of all entities, summed over the parts looked at: fewer parts of larger graphs
PARTS_STALL = 30  # parts after which the gap must be smaller: better plans and bounds come late
NARROWED_FRACTION = 0.9  # of the choices that must be left, at most, for another search where memory has no price
PARTS_PROGRESS = 0.95  # the fraction of the gap that must be left then, at most
FORBIDDEN_COSTS = 10.0  # of the best plan: the cost of a conversion with which no plan fits

# Frontiers of seconds and bytes (frontier.py, combination.py).
MOST_LABELS = 2**20  # partial plans at one step before those are dropped that others dominate
STEP_LABELS = 2**16  # partial plans after that; where there are more, the limit is lowered
COMPARISONS = 10**8  # pairs of partial plans compared at one step, above which it is lowered, too
LIMIT_HALVINGS = 8  # of what a limit is above the least priced cost, before there are too many plans
FRONTIER_CHOICES = 100_000  # choices of all entities, above which no frontier is tried
FEW_FRONTIER_CHOICES = 1000  # choices below the cutoff, up to which all plans below it are tried at once
FRONTIERS = 8  # raises of the bound at most otherwise, the first one by the gap
FRONTIER_RAISE = 3.0  # factor from one raise to the next
POINT_ROUNDS = 16  # frontiers with the bytes at more and more points
RELAXED_ROUNDS = 3  # of these, with tensors relaxed
FRONTIER_PLANS = 50  # plans of a frontier that are tried, as they may exceed the budget at points without a price

# Plans that are joined of two (joining.py).
WINDOW = 80  # operators to each side of the cut that are planned again

# Room that is left (filling.py).
FILLED_WIDTH = 15  # operators to each side of a place of a window: most plans of so few can be listed
FILLED_PLACES = 3  # of one window at most
FILLED_WINDOWS = 4  # unlike windows in a pass; each takes up to half a second where layers have many choices
FILLING_PROGRESS = 0.9  # fraction of the gap that must be left after a pass over all windows, at most, for another one

# Recombination, and the integer program (programs.py, ilp.py).
RECOMBINED_PLANS = 16  # the last plans, whose choices are recombined: fewer if they have more than FEW_CHOICES
RECOMBINATION_NODES = 200  # nodes of the solver's search tree
ROUGH_GAP = 0.01  # gap of a recombination that only serves to drop choices before the integer program
NEAR_BUDGET = 0.95  # fraction of the budget: points that hold more may exceed it in a better plan
FEW_CHOICES = 2500  # choices among which the integer program decides within a minute
VERY_FEW_CHOICES = 300  # choices among which it decides at once
NODES = 5000  # nodes of a solver's search tree; good plans appear earlier, and a proof may take hours
POINTS_AT_ONCE = 30  # program points that get a row in one round
ROW_TOLERANCE = 1e-6  # excess of a row, and absolute gap, that solvers tolerate
VARIABLE_BYTES = 3000  # bytes per variable in HiGHS; large programs take 0.8 to 1.1 times the estimated bytes
TERM_BYTES = 500  # bytes per coefficient of a row

# Wide graphs (wide.py).
WIDE_ROUNDS = 12  # of the pairwise solver; later ones gain little on graphs of a few thousand nodes

# Overlap of communication with computation (overlap.py).
OVERLAP_ROUNDS = 4  # solutions of discounted problems at most
OVERLAP_CHOICES = 20_000  # choices of all entities, up to which discounted problems are solved within the budget
OVERLAP_PLANS = 3  # plans next to a solution's that are scheduled: each takes 10 to 50 ms, a solution up to a second
OVERLAP_GAP = 0.01  # gap of these solutions: hidden time is known no better
OVERLAP_STEPS = 8  # fractions of a collective's time are whole eighths, so that equal layers come out equal

# Reports (report.py).
INCUMBENT_GAP = 0.01  # by which an incumbent of a report is better than the one before it, but the last

# Finer meshes (planner.py).
GIVEN_MESH_FRACTION = 0.6  # of the time left that the given mesh may take before a finer one is tried
