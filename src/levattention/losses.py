"""f, the function applied to ⟨q, k⟩ before a row of attention is normalised."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor


@runtime_checkable
class Loss(Protocol):
    """f ≥ 0 with f(0) = 0, and Ψ, the largest possible sum of its sensitivities."""

    def __call__(self, z: Tensor) -> Tensor:
        """f(z), entry by entry."""
        ...

    def total_sensitivity(self, d: int, n: int) -> float:
        """Ψ ≥ Σᵢ σᵢ(K) for every K with n rows and d columns; so |U| ≤ Ψ/ε."""
        ...


@dataclass(frozen=True)
class Power:
    """f(x) = |x|^p for real p ≥ 1; p = 2 gives leverage scores.

    Example:
        >>> import torch
        >>> Power(4)(torch.tensor([-2.0, 0.5])).tolist()
        [16.0, 0.0625]
    """

    p: float = 2

    def __post_init__(self) -> None:
        if not (isinstance(self.p, int | float) and math.isfinite(self.p) and self.p >= 1):
            raise ValueError(f"p: expected a finite number >= 1, got {self.p!r}")

    def __call__(self, z: Tensor) -> Tensor:
        """|z|^p."""
        return z.square() if self.p == 2 else z.abs().pow(self.p)

    @property
    def even(self) -> bool:
        """Whether p is an even integer, so that |x|^p is the square of a polynomial."""
        return self.p % 2 == 0

    def total_sensitivity(self, d: int, n: int) -> float:
        """d for p ≤ 2, d^(p/2) beyond; never more than n, since each sensitivity is at most 1."""
        return min(float(n), float(d) ** max(1.0, self.p / 2))


def to_config(loss: Loss) -> dict[str, Any]:
    """The loss as plain values that survive JSON."""
    if not is_dataclass(loss) or isinstance(loss, type) or type(loss).__module__ != __name__:
        raise ValueError(f"loss: expected one of levattention.losses, got {loss!r}")
    return {"loss": type(loss).__name__, **asdict(loss)}


def from_config(config: dict[str, Any]) -> Loss:
    """The loss that `to_config` described."""
    values = dict(config)
    name = values.pop("loss", None)
    kind = globals().get(name) if isinstance(name, str) else None
    if not (isinstance(kind, type) and is_dataclass(kind)):
        raise ValueError(f"loss: expected the name of a loss, got {name!r}")
    loss = kind(**values)
    assert isinstance(loss, Loss)  # every dataclass of this module is one
    return loss
