"""The C interface of the library of solvers as data: one table per header in ``include/hidet_dist/search``."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int32, c_int64, c_uint8, c_void_p

from hidet_dist.native.interface import Header, Signature

# elimination.h

EliminationStop = ctypes.CFUNCTYPE(c_int32)

ELIMINATION = Header(
    functions={
        "tables_create": Signature(c_void_p, (c_int64,)),
        "tables_destroy": Signature(None, (c_void_p,)),
        "tables_add": Signature(c_int64, (c_void_p, c_int32, POINTER(c_int64), POINTER(c_double))),
        "tables_bytes": Signature(c_int64, (c_void_p,)),
        "tables_shape": Signature(c_int32, (c_void_p, c_int64, POINTER(c_int64))),
        "tables_entries": Signature(POINTER(c_double), (c_void_p, c_int64)),
        "network_create": Signature(
            c_void_p,
            (
                *(c_void_p, c_int64, POINTER(c_int64)),  # tables, count, sizes
                *(c_int64, POINTER(c_int64), POINTER(c_int64), POINTER(c_int64)),  # factors, tables, begins, variables
            ),
        ),
        "network_destroy": Signature(None, (c_void_p,)),
        "network_order": Signature(
            c_int32,
            (
                *(c_void_p, POINTER(c_uint8), c_int32, c_double, EliminationStop),  # kept, by_table, work_limit
                *(POINTER(c_int64), POINTER(c_int64), POINTER(c_double)),  # order, length, work
            ),
        ),
        "network_eliminate": Signature(c_int32, (c_void_p, c_int64, POINTER(c_int64), EliminationStop)),
        "network_constant": Signature(c_double, (c_void_p,)),
        "network_values": Signature(c_int32, (c_void_p, POINTER(c_int64))),
        "network_least_over": Signature(c_int32, (c_void_p, c_int64, POINTER(c_int64), POINTER(c_double))),
        "network_marginals": Signature(c_int32, (c_void_p, c_int64, c_double, EliminationStop, POINTER(c_double))),
    },
    callbacks={"elimination_stop": EliminationStop},
    constants={
        # hidet_dist_elimination_status
        "ELIMINATED": 0,
        "ELIMINATION_STOPPED": 1,
        "ELIMINATION_TOO_WIDE": 2,
        "ELIMINATION_NO_MEMORY": 3,
    },
)


# capacity.h


class CapacityProblem(ctypes.Structure):
    """``hidet_dist_capacity_problem``: entities with live intervals and inputs, and the bytes of their choices."""

    _fields_ = (
        ("entities", c_int64),
        ("points", c_int64),
        *(
            (name, POINTER(c_int64))
            for name in (
                *("choices", "resident"),
                *("interval_begin", "interval_first", "interval_last", "interval_bytes"),
                *("input_begin", "input_producer", "input_first", "input_last", "input_produced", "input_consumed"),
                *("input_rows", "input_columns", "input_held", "input_working"),
                *("bytes", "specs"),
            )
        ),
    )


CAPACITY = Header(
    functions={
        "fitting_create": Signature(
            c_void_p,
            (
                *(POINTER(CapacityProblem), POINTER(c_uint8)),  # problem, kept
                *(c_int64, c_int64, c_int64, c_int64),  # budget, least, most, rounds
                *(EliminationStop, POINTER(c_int32)),  # stop, status
            ),
        ),
        "fitting_destroy": Signature(None, (c_void_p,)),
        "fitting_kept": Signature(None, (c_void_p, POINTER(c_uint8))),
        "fitting_resident": Signature(None, (c_void_p, POINTER(c_int64))),
        "fitting_allowed": Signature(POINTER(c_uint8), (c_void_p, c_int64)),
    },
    structures={"capacity_problem": CapacityProblem},
    constants={
        # hidet_dist_capacity_status
        "CAPACITY_FITS": 0,
        "CAPACITY_STOPPED": 1,
        "CAPACITY_EXCEEDED": 2,
        "CAPACITY_NO_MEMORY": 3,
    },
)


# frontier.h


class FrontierBytes(ctypes.Structure):
    """``hidet_dist_frontier_bytes``: the bytes of factors."""

    _fields_ = (
        ("tables", c_void_p),
        ("paid", POINTER(c_int64)),
        ("always", POINTER(c_int64)),
        ("points", c_int64),
        ("begin", POINTER(c_int64)),
        ("factor", POINTER(c_int64)),
        ("table", POINTER(c_int64)),
        ("least", POINTER(c_double)),
        ("floor", c_double),
        ("most", c_double),
    )


class FrontierLimits(ctypes.Structure):
    """``hidet_dist_frontier_limits``: how many labels there may be."""

    _fields_ = (
        ("below", c_double),
        ("joined", c_int64),
        ("left", c_int64),
        ("comparisons", c_int64),
        ("halvings", c_int64),
    )


FRONTIER = Header(
    functions={
        "frontier_create": Signature(
            c_void_p,
            (
                *(c_void_p, POINTER(FrontierBytes), POINTER(FrontierLimits)),  # network, bytes, limits
                *(EliminationStop, POINTER(c_int32)),  # stop, status
            ),
        ),
        "frontier_destroy": Signature(None, (c_void_p,)),
        "frontier_below": Signature(c_double, (c_void_p,)),
        "frontier_count": Signature(c_int64, (c_void_p,)),
        "frontier_sums": Signature(None, (c_void_p, POINTER(c_double), POINTER(c_double))),
        "frontier_values": Signature(None, (c_void_p, c_int64, POINTER(c_int64))),
    },
    structures={"frontier_bytes": FrontierBytes, "frontier_limits": FrontierLimits},
)


# pairwise.h


class NativePairwiseProblem(ctypes.Structure):
    """``hidet_dist_pairwise_problem``: a problem as flat arrays."""

    _fields_ = (
        ("nodes", c_int64),
        ("edges", c_int64),
        ("strategy_begin", POINTER(c_int64)),
        ("cost", POINTER(c_double)),
        ("bytes", POINTER(c_double)),
        ("interval_begin", POINTER(c_int64)),
        ("interval_end", POINTER(c_int64)),
        ("edge_nodes", POINTER(c_int64)),
        ("edge_matrix", POINTER(c_int64)),
        ("matrix_begin", POINTER(c_int64)),
        ("entries", POINTER(c_double)),
        ("byte_limit", c_double),
        ("forbidden", c_double),
    )


class PairwiseOptions(ctypes.Structure):
    """``hidet_dist_pairwise_options``: the stopping criteria."""

    _fields_ = (
        ("seconds", c_double),
        ("gap", c_double),
        ("rounds", c_int64),
        ("seed", c_int64),
        ("threads", c_int64),
        ("cpu_time", c_int64),
        ("entries", c_int64),
    )


class PairwiseResult(ctypes.Structure):
    """``hidet_dist_pairwise_result``: the cost of the best assignment, and a lower bound on all."""

    _fields_ = (("cost", c_double), ("bound", c_double), ("seconds", c_double), ("rounds", c_int64))


PairwiseProgress = ctypes.CFUNCTYPE(c_int32, c_void_p, c_double, c_double, c_double)

PAIRWISE = Header(
    functions={
        "pairwise_solve": Signature(
            c_int32,
            (
                POINTER(NativePairwiseProblem),
                POINTER(PairwiseOptions),
                PairwiseProgress,
                c_void_p,
                POINTER(c_int32),
                POINTER(PairwiseResult),
            ),
        ),
    },
    structures={
        "pairwise_problem": NativePairwiseProblem,
        "pairwise_options": PairwiseOptions,
        "pairwise_result": PairwiseResult,
    },
    callbacks={"pairwise_progress": PairwiseProgress},
)


# paths.h

PATHS = Header(
    functions={
        "paths_create": Signature(c_void_p, ()),
        "paths_destroy": Signature(None, (c_void_p,)),
        "paths_expand": Signature(
            c_int32, (c_void_p, c_int32, c_int64, POINTER(c_int32), POINTER(c_double), POINTER(c_uint8))
        ),
        "paths_reach": Signature(c_int32, (c_void_p, c_int32, c_int64, POINTER(c_int32))),
        "paths_seconds": Signature(None, (c_void_p, c_int32, c_int64, POINTER(c_int32), POINTER(c_double))),
        "paths_communicating": Signature(None, (c_void_p, c_int32, c_int64, POINTER(c_int32), POINTER(c_int32))),
        "paths_last_edge": Signature(None, (c_void_p, c_int32, c_int32, POINTER(c_int32))),
        "paths_size": Signature(c_int64, (c_void_p,)),
    },
    constants={
        # hidet_dist_paths_status
        "PATHS_REACHED": -1,
        "PATHS_NONE": -2,
        "PATHS_NO_MEMORY": -3,
    },
)


# solvers.h

SOLVERS = Header(
    functions={
        "search_abi_version": Signature(c_int32, ()),
        "search_last_error": Signature(c_char_p, ()),
    },
    constants={"SEARCH_ABI_VERSION": 2},
)


HEADERS: dict[str, Header] = {
    "capacity.h": CAPACITY,
    "elimination.h": ELIMINATION,
    "frontier.h": FRONTIER,
    "pairwise.h": PAIRWISE,
    "paths.h": PATHS,
    "solvers.h": SOLVERS,
}
"""The table of each header in ``include/hidet_dist/search``."""
