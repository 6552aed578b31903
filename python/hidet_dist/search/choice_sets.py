"""The sets of choices with which the planning of a graph may be formulated: fewer of them where time is short."""

from __future__ import annotations

import enum


class ChoiceSet(enum.Enum):
    """Which choices a problem has of operators, weights and states without pins."""

    ALL = enum.auto()
    """All of them."""

    FEW = enum.auto()
    """Those in which neighbouring mesh axes split one factor together.

    See :meth:`hidet_dist.rules.rule.Rule.joint_choices`. Weights are stored whole, or one dim of each is split by all
    devices. The choices are not proven: it remains to prove those that a plan takes.
    """

    FEW_PROVEN = enum.auto()
    """The same, but for those that are refuted."""

    REPLICATED = enum.auto()
    """Operators compute everything on each device. Weights are stored as with few choices, and gathered to be read."""
