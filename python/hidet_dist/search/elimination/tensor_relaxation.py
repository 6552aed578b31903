"""What the eliminations of one search learn of the tensors that are relaxed, each for those that follow."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt


@dataclass
class TensorRelaxation:
    """Which tensors are relaxed, and how the cost of their conversions is split among their readers.

    It belongs to one search: what that learns would lead another one, of other choices or costs, to worse bounds.

    Attributes
    ----------
    narrowed: the tensors that are relaxed although few operators read them, because eliminations would be too wide;
        None as long as none was (:func:`hidet_dist.search.elimination.narrowing.narrow`).
    portions: ``portions[tensor][reader, spec]`` is what a reader pays of the conversion to a spec if it requires that,
        where readers do not pay equal portions. The portions of all readers sum to 1 at most.
    steps: for each tensor, the number of steps of its portions towards the plans of eliminations.
    paired: up to so many readers split the conversions from each spec that may be made, more of them the least ones;
        None as long as that is not known.
    wide: whether more readers than cost little work were looked for.
    pairs, whole: where a gap is left even so, tensors that are relaxed, and split from each spec, and those that are
        not relaxed.
    tightenings: how often such tensors were looked for.
    version: grows with every change of how costs are split.
    """

    narrowed: frozenset[int] | None = None
    portions: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    steps: dict[int, int] = field(default_factory=dict)
    paired: int | None = None
    wide: bool = False
    pairs: frozenset[int] = frozenset()
    whole: frozenset[int] = frozenset()
    tightenings: int = 0
    version: int = 0

    def of(self, tensor: int, readers: int, specs: int) -> npt.NDArray[np.float64]:
        """Return the portions of a tensor of so many readers and specs: equal ones, if no others are known."""
        portions = self.portions.get(tensor)
        if portions is None or portions.shape != (readers, specs):
            return np.full((readers, specs), 1.0 / readers)
        return portions

    def restart(self, tensor: int) -> None:
        """Give the readers of a tensor equal portions, which move freely again."""
        self.portions.pop(tensor, None)
        self.steps.pop(tensor, None)

    def relax_most(self) -> None:
        """Relax all tensors of many readers, from the least conversions: nothing leaves an elimination less work."""
        self.paired, self.pairs, self.whole = 0, frozenset(), frozenset()
        self.version += 1
