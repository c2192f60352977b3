"""f, the function applied to ⟨q, k⟩ before a row of attention is normalised."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Loss(Protocol):
    """f ≥ 0 (with f(0) = 0, softmax apart), and Ψ, a bound on the sum of its sensitivities."""

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


@dataclass(frozen=True)
class Huber:
    """f(x) = x² up to the threshold τ and linear beyond it.

    As printed in the paper f jumps at τ unless τ = 1. Two continuous forms are offered instead, on purpose:
    smooth (C¹, the default) 2τ|x| − τ², and, with smooth=False (C⁰), τ|x|. Both are τ²f₁(x/τ), so neither the
    sensitivities nor the universal set depends on τ; weights of a given query do.

    Attributes:
        threshold: τ > 0.
        smooth: whether the derivative is continuous too.

    Example:
        >>> import torch
        >>> Huber(2.0)(torch.tensor([1.0, -3.0])).tolist()
        [1.0, 8.0]
        >>> Huber(2.0, smooth=False)(torch.tensor([1.0, -3.0])).tolist()
        [1.0, 6.0]
    """

    threshold: float = 1.0
    smooth: bool = True

    def __post_init__(self) -> None:
        _require_positive("threshold", self.threshold)

    def __call__(self, z: Tensor) -> Tensor:
        """f(z), entry by entry."""
        size, t = z.abs(), self.threshold
        tail = t * (2 * size - t) if self.smooth else t * size
        return torch.where(size <= t, size.square(), tail)

    def slope(self, z: Tensor) -> Tensor:
        """df/d(z²), the weight of iteratively reweighted least squares: f is concave in z²."""
        size, t = z.abs(), self.threshold
        return torch.where(size <= t, 1.0, (t if self.smooth else t / 2) / size.clamp(min=t))

    @property
    def linear(self) -> float:
        """c with f(x) ≤ cτ|x|."""
        return 2.0 if self.smooth else 1.0

    @property
    def density(self) -> float:
        """C with |{i : σᵢ ≥ ε}| ≤ C·d/ε for every ε and K: 4/3 smooth, 1 otherwise (docs/robust.md)."""
        return 4 / 3 if self.smooth else 1.0

    def total_sensitivity(self, d: int, n: int) -> float:
        """C·d·(1 + ln(n/(C·d))), from the size of {σ ≥ ε} at every ε; n where that is less."""
        return _layered(self.density * d, n)


@dataclass(frozen=True)
class Tukey:
    """f(x) = min(x², τ²): beyond the threshold τ a key counts, but no more than τ².

    The paper's form, x² then 1, jumps at τ unless τ = 1; this one is continuous, on purpose. It is τ²f₁(x/τ), so
    sensitivities and universal set do not depend on τ.

    Example:
        >>> import torch
        >>> Tukey(2.0)(torch.tensor([1.0, -3.0])).tolist()
        [1.0, 4.0]
    """

    threshold: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("threshold", self.threshold)

    def __call__(self, z: Tensor) -> Tensor:
        """f(z), entry by entry."""
        return z.square().clamp(max=self.threshold**2)

    def slope(self, z: Tensor) -> Tensor:
        """df/d(z²): 1 up to the threshold, 0 beyond."""
        return (z.abs() <= self.threshold).to(z.dtype)

    @property
    def density(self) -> float:
        """C with |{i : σᵢ ≥ ε}| ≤ C·d/ε for every ε and K (docs/robust.md)."""
        return 1.0

    def total_sensitivity(self, d: int, n: int) -> float:
        """d·(1 + ln(n/d)), from the size of {σ ≥ ε} at every ε; n where that is less."""
        return _layered(self.density * d, n)


@dataclass(frozen=True)
class Softmax:
    """f(x) = exp(scale·x), for queries with ‖q‖ ≤ radius alone.

    f sees ⟨q, k⟩ and not d, so the usual factor is the caller's: scale = 1/√d for keys and queries as a
    transformer holds them, 1 (the default) where the factor is in the keys already.

    Attributes:
        radius: R > 0, the longest query that is covered.
        scale: what multiplies ⟨q, k⟩.

    Example:
        >>> import torch
        >>> Softmax(4.0, scale=0.5)(torch.tensor([0.0, 2.0])).tolist()
        [1.0, 2.7182817459106445]
    """

    radius: float
    scale: float = 1.0

    def __post_init__(self) -> None:
        _require_positive("radius", self.radius)
        _require_positive("scale", self.scale)

    def __call__(self, z: Tensor) -> Tensor:
        """exp(scale·z), entry by entry."""
        return (self.scale * z).exp()

    def total_sensitivity(self, d: int, n: int) -> float:
        """n: no bound in d exists. With d = 2 and long queries every key on a circle can take all the weight."""
        return float(n)


def _layered(mass: float, n: int) -> float:
    """∫₀¹ min(n, mass/ε) dε, which bounds Σσᵢ where |{σ ≥ ε}| ≤ mass/ε for every ε."""
    return mass * (1 + math.log(n / mass)) if n > mass else float(n)


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
        raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
