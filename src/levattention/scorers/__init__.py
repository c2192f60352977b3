"""Keys -> scores, one algorithm a file. A certified score bounds the sensitivity of its key from above."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from levattention.scorers.baselines import Norm, Random
from levattention.scorers.hashing import HashedReference
from levattention.scorers.leverage import Leverage
from levattention.scorers.lewis import Lewis
from levattention.scorers.lift import Lift, PowerBound
from levattention.scorers.robust import Robust
from levattention.scorers.sensitivity import Sensitivities, Sensitivity
from levattention.scorers.sketched import RightSketch, SketchedLeverage
from levattention.scorers.softmax import SoftmaxBall

__all__ = [
    "HashedReference",
    "Leverage",
    "Lewis",
    "Lift",
    "Norm",
    "PowerBound",
    "Random",
    "RightSketch",
    "Robust",
    "Scorer",
    "Sensitivities",
    "Sensitivity",
    "SketchedLeverage",
    "SoftmaxBall",
]


@runtime_checkable
class Scorer(Protocol):
    """Called with keys (*batch, n, d), gives scores (*batch, n).

    A certified scorer also has `bound(d, n)`, which no sum of its scores exceeds. It may have `decide(keys, eps)`:
    certified scores that only need to be sharp enough to tell which keys reach ε.
    """

    certified: ClassVar[bool]

    def __call__(self, keys: Tensor) -> Tensor:
        """Scores of the keys."""
        ...
