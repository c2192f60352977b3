"""A fitted normaliser: Z(q) = Σⱼ f(⟨kⱼ, q⟩) from a few weighted rows, in time that does not depend on n."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.csr import is_csr
from levattention.features import TensorPower
from levattention.gram import heads_first
from levattention.losses import Loss, from_config, to_config


@dataclass(frozen=True)
class Guarantee:
    """What Z is good for.

    Attributes:
        delta: Z lies within 1 ± δ of the true sum; 0 where it is exact up to rounding.
        failure: the probability, over the seed and for each head, that it does not.
        every_query: whether that holds for all queries at once, or for each query by itself.
        proved: whether there is a proof, or measurements alone.
        how: where Z comes from.
    """

    delta: float
    failure: float
    every_query: bool
    proved: bool
    how: str

    def __str__(self) -> str:
        if self.delta == 0:
            return f"exact up to rounding, for every query ({self.how})"
        scope = "for all queries at once" if self.every_query else "for each query"
        basis = "proved" if self.proved else "measured, not proved"
        return (
            f"within 1 ± {self.delta:g} {scope} with probability at least 1 − {self.failure:.3g}, {basis} ({self.how})"
        )


@runtime_checkable
class FittedNormaliser(Protocol):
    """Z for queries (*batch, m, d) in fp64."""

    @property
    def guarantee(self) -> Guarantee:
        """What Z is good for."""
        ...

    def __call__(self, queries: Tensor) -> Tensor:
        """Z of every query, (*batch, m)."""
        ...

    @property
    def work(self) -> int:
        """Numbers held at once for each query."""
        ...

    @property
    def magnitude(self) -> Tensor:
        """The size of the keys, (*batch,), to scale queries by."""
        ...

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values to be saved."""
        ...


@runtime_checkable
class Normaliser(Protocol):
    """How a normaliser is made: called with keys (*batch, n, d) and the loss."""

    def __call__(self, keys: Tensor, loss: Loss) -> FittedNormaliser:
        """The fitted normaliser."""
        ...


@dataclass(frozen=True)
class WeightedRows:
    """Z(q) = Σⱼ wⱼ f(⟨rowⱼ, φ(q·frame)⟩): R for p = 2, R of the lift for even p, ΠK, or a sample of the keys.

    Attributes:
        loss: f.
        rows: (*batch, m, D); rows of zeros where a head has fewer.
        guarantee: see `Guarantee`.
        weights: w, (*batch, m); None: 1.
        frame: coordinates in which queries are lifted, (*batch, d, r); None: as they are.
        lift: the tensor power that φ is; 1: none.
    """

    loss: Loss
    rows: Float64[Tensor, "*batch m wide"]
    guarantee: Guarantee
    weights: Float64[Tensor, "*batch m"] | None = None
    frame: Float64[Tensor, "*batch d r"] | None = None
    lift: int = 1

    def __call__(self, queries: Tensor) -> Float64[Tensor, "*batch q"]:
        """Z of every query."""
        at = queries if self.frame is None else queries @ self.frame
        values = self.loss((at if self.lift == 1 else TensorPower(self.lift)(at)) @ self.rows.mT)
        return values.sum(-1) if self.weights is None else (values @ self.weights.unsqueeze(-1)).squeeze(-1)

    @property
    def work(self) -> int:
        """Numbers held at once for each query."""
        return self.rows.shape[-2] + self.rows.shape[-1]

    @property
    def magnitude(self) -> Tensor:
        """The largest entry of what queries are multiplied by."""
        return (self.rows if self.frame is None else self.frame).abs().amax((-2, -1))

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain values to be saved."""
        held = {"rows": self.rows, "weights": self.weights, "frame": self.frame}
        plain = {"loss": to_config(self.loss), "lift": self.lift, "guarantee": asdict(self.guarantee)}
        return {name: tensor for name, tensor in held.items() if tensor is not None}, {"kind": "rows", **plain}

    @classmethod
    def restore(cls, tensors: dict[str, Tensor], plain: dict[str, Any]) -> WeightedRows:
        """What `state` described."""
        guarantee = Guarantee(**plain["guarantee"])
        held = (tensors["rows"], guarantee, tensors.get("weights"), tensors.get("frame"))
        return cls(from_config(plain["loss"]), *held, lift=plain["lift"])


def elements(keys: Tensor) -> list[Tensor]:
    """Each batch element's keys (n, d)."""
    return [keys] if is_csr(keys) else list(heads_first(keys))


def stacked(parts: list[Tensor], batch: torch.Size) -> Tensor:
    """Tensors of any shapes, padded with zeros to one and stacked as the batch is."""
    shape = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    out = parts[0].new_zeros((len(parts), *shape))
    for slot, part in zip(out, parts, strict=True):
        slot[tuple(slice(size) for size in part.shape)] = part
    return out.reshape(*batch, *shape)


def require_rates(**rates: float) -> None:
    """Nothing, if each of these is a number in (0, 1).

    Raises:
        ValueError: names the first that is not.
    """
    for name, value in rates.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1:
            raise ValueError(f"{name}: expected a number in (0, 1), got {value!r}")
