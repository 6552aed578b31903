"""The exceptions that hidet_dist raises. Each message says what was wrong, with which value, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class HidetDistError(Exception):
    """Base of every error that hidet_dist raises on purpose."""


class ConfigError(HidetDistError, ValueError):
    """A configuration has an unknown key, a value of the wrong type, or values that contradict each other."""


class SpecError(HidetDistError, ValueError):
    """A sharding spec is malformed, or does not fit the tensor or the mesh it is used with."""


class TraceError(HidetDistError, ValueError):
    """A model could not be traced to a graph."""


class EmptyTensorError(TraceError):
    """A model computes with tensors that have no elements."""


@dataclass(frozen=True)
class MissingOperator:
    """A call, in a model, of an operator that is not supported.

    ``operator`` is its name, ``reason`` says why it is not supported, ``module`` is the path of the module that calls
    it, and ``line`` the file and line of the code; either may be empty.
    """

    operator: str
    reason: str
    module: str = ""
    line: str = ""


class UnsupportedModelError(TraceError):
    """A model has operators that are not supported.

    Attributes
    ----------
    missing: tuple of MissingOperator
        Each call of such an operator.
    """

    def __init__(self, model: str, missing: Sequence[MissingOperator]):
        self.missing = tuple(missing)
        calls: dict[tuple[str, str], list[MissingOperator]] = {}
        for call in missing:
            calls.setdefault((call.operator, call.reason), []).append(call)
        lines = []
        for (operator, reason), made in calls.items():
            places = list(dict.fromkeys(" ".join(filter(None, (x.module, x.line and f"({x.line})"))) for x in made))
            shown = ", ".join(place or "the model itself" for place in places[:_PLACES])
            more = f" and {len(places) - _PLACES} other places" if len(places) > _PLACES else ""
            lines.append(f"  {operator}, called {len(made)} times, in {shown}{more}: {reason}")
        super().__init__(
            f"{model} uses {len({call.operator for call in missing})} operators in ways that are not supported:\n"
            + "\n".join(lines)
            + "\nReplace them in the model by operators that are supported, or trace the parts before and after them "
            "as models of their own."
        )


_PLACES = 3  # that a message names of one operator


class WeightsError(HidetDistError, ValueError):
    """A weights file is missing or malformed, or lacks a weight of the graph, or has it in another shape or dtype."""


class CalibrationError(HidetDistError, RuntimeError):
    """The machine could not be measured: a rank failed, the time limit was reached, or no figures fit."""


class PlanError(HidetDistError, ValueError):
    """A plan does not fit the graph, or was not written by hidet_dist."""


class ProblemError(HidetDistError, ValueError):
    """A pairwise problem, or a solution of one, is malformed; it says what and where."""


class InfeasibleError(HidetDistError):
    """No plan fits the memory budget.

    Attributes
    ----------
    least_budget: int
        The least per-device budget, in bytes, for which a plan is known.
    bound_bytes: int
        Bytes below which there is no plan, as far as that is proven.
    """

    def __init__(self, message: str, least_budget: int, bound_bytes: int = 0):
        super().__init__(message)
        self.least_budget = least_budget
        self.bound_bytes = bound_bytes


class OverBudgetError(InfeasibleError):
    """A program holds more memory than its budget, though its plan was predicted to fit.

    Attributes
    ----------
    excess_bytes: int
        The bytes that the program holds beside those that were predicted.
    """

    def __init__(self, message: str, held_bytes: int, excess_bytes: int):
        super().__init__(message, held_bytes)
        self.excess_bytes = excess_bytes


class SolverError(HidetDistError, RuntimeError):
    """The ILP solver failed, or stopped without a usable solution."""


class SearchLimitWarning(UserWarning):
    """Planning reached its time limit: the plan is the best one until then, and depends on the machine's speed."""


class UnusedWeightsWarning(UserWarning):
    """The files of a checkpoint have tensors that the model does not use."""


class MemoryBudgetWarning(UserWarning):
    """A program holds a little more memory than its budget."""


class VerificationError(HidetDistError, RuntimeError):
    """A result failed its check: a defect of hidet_dist, caught before the result was used."""


class PartitionError(HidetDistError, RuntimeError):
    """A plan could not be turned into a sharded program."""


class CompileError(HidetDistError, RuntimeError):
    """A program could not be compiled."""


class ArtifactError(HidetDistError):
    """An artifact folder is missing, incomplete, altered, or of another format version."""


class InputError(HidetDistError, ValueError):
    """An input of a loaded partition has the wrong count, dtype, shape or device."""


class ForkError(HidetDistError, RuntimeError):
    """A child made by ``fork`` used an object of its parent: a loaded partition or a communicator."""


class CallError(HidetDistError, RuntimeError):
    """A call of a loaded partition was refused by some rank. No rank ran it; later calls are possible."""


class RendezvousError(HidetDistError, RuntimeError):
    """The ranks did not connect: one did not arrive in time, or the launch settings contradict each other."""


class CommunicationError(HidetDistError, RuntimeError):
    """A collective failed: a rank died, timed out, or called another collective than its peers.

    Attributes
    ----------
    ranks: tuple[int, ...]
        The ranks held responsible, as far as they could be found out.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()):
        super().__init__(message)
        self.ranks = ranks


class RequestError(HidetDistError, ValueError):
    """A request to generate tokens is wrong: no request like it will be served.

    Attributes
    ----------
    parameter: str
        The parameter that is wrong, or nothing.
    """

    def __init__(self, message: str, parameter: str = ""):
        super().__init__(message)
        self.parameter = parameter


class BusyError(HidetDistError, RuntimeError):
    """A request was refused because too many wait already. It may be made again later."""


class EngineError(HidetDistError, RuntimeError):
    """A request ended because the model failed, or because the engine was closed."""
