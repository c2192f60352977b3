"""Z(q) = Σⱼ f(⟨kⱼ, q⟩): exact, sampled or sketched, from a few rows. Each says what it guarantees."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from levattention.losses import Loss
from levattention.normaliser.exact import Exact
from levattention.normaliser.rows import FittedNormaliser, Guarantee, Normaliser, WeightedRows
from levattention.normaliser.sampled import Sampled
from levattention.normaliser.sketched import Sketched
from levattention.normaliser.tensor import SketchedLift, TensorSketched

__all__ = [
    "Exact",
    "FittedNormaliser",
    "Guarantee",
    "Normaliser",
    "Sampled",
    "Sketched",
    "SketchedLift",
    "TensorSketched",
    "WeightedRows",
    "default_normaliser",
    "restore",
]


def default_normaliser(keys: Tensor, loss: Loss) -> Normaliser:
    """`Exact` where it fits, `Sampled` with its defaults elsewhere."""
    return Exact() if Exact.fits(keys, loss) else Sampled()


def restore(tensors: dict[str, Tensor], plain: dict[str, Any]) -> FittedNormaliser:
    """The fitted normaliser whose `state` these are."""
    kinds: dict[str, Any] = {"rows": WeightedRows, "tensor": SketchedLift}
    return kinds[plain["kind"]].restore(tensors, plain)
