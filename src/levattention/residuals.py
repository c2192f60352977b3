"""What stands for the light keys, those outside the universal set: nothing, a weighted sample, weighted centroids.

Each spends the same budget of k slots. Given the k best keys, best first, a residual gives back k slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from levattention.scorers import Random
from levattention.slots import Slots, gather_rows
from levattention.universal import UniversalSet, best_first

__all__ = ["Cluster", "Drop", "Residual", "Sample"]


@runtime_checkable
class Residual(Protocol):
    """Called with the queries, keys and values of a head and its best keys, gives the slots to attend to.

    queries (*batch, m, d), keys (*batch, n, d), values (*batch, n, e); mask (*batch, n) is False for keys that
    must not be seen, which are zero here. Whatever it chooses it must choose without gradients.
    """

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, chosen: UniversalSet, mask: Tensor, scale: float
    ) -> Slots:
        """The slots."""
        ...


@dataclass(frozen=True)
class Drop:
    """Light keys are left out, as in the paper: k keys, each of weight 1."""

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, chosen: UniversalSet, mask: Tensor, scale: float
    ) -> Slots:
        """The chosen keys themselves."""
        return key_slots(keys, values, chosen.index, torch.where(chosen.valid, 0.0, -torch.inf))


@dataclass(frozen=True)
class Sample:
    """A share of the budget for the best keys, the rest for light keys drawn uniformly, each of weight 1/π.

    π = s/(number of light keys) is the probability that a light key is among the s drawn, so the sums over the light
    keys in the softmax are estimated without bias. The draw depends on the seed, the head and the position alone.

    Attributes:
        heavy: share of the budget that the best keys take.
        seed: of the draw.
    """

    heavy: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        _require_share(self.heavy)

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, chosen: UniversalSet, mask: Tensor, scale: float
    ) -> Slots:
        """The best keys and the drawn ones."""
        budget = chosen.index.shape[-1]
        best = heavy_count(budget, self.heavy)
        with torch.no_grad():
            light = light_keys(chosen, best, mask)
            draw = torch.where(light, Random(self.seed)(keys), -1.0)
            drawn = best_first(draw, budget - best)
            usable = light.gather(-1, drawn)
            size = light.sum(-1, keepdim=True).double()
            inverse = (size / usable.sum(-1, keepdim=True).clamp(min=1)).expand(drawn.shape)
            weight = torch.cat([chosen.valid[..., :best].double(), inverse * usable], -1)
            index = torch.cat([chosen.index[..., :best], drawn], -1)
        return key_slots(keys, values, index, weight.log())


@dataclass(frozen=True)
class Cluster:
    """A share of the budget for the best keys, the rest for centroids of the light keys, each of weight its count.

    k-means in the space of keys, seeded at the next best keys, so nothing is random. For a cluster C of light keys,
    Σ_C exp(s·q·k) ≈ |C|·exp(s·q·k̄ + ½s²·Σⱼ qⱼ²·Var_C(kⱼ)): the mean of an exponential to second order, with the
    covariance cut to its diagonal. Gradients reach keys and values through the means and variances.

    Attributes:
        heavy: share of the budget that the best keys take.
        iterations: of k-means.
        second_order: whether to add the variance term.
    """

    heavy: float = 0.25
    iterations: int = 8
    second_order: bool = True

    def __post_init__(self) -> None:
        _require_share(self.heavy)
        if self.iterations < 0:
            raise ValueError(f"iterations: expected at least 0, got {self.iterations}")

    def __call__(
        self, queries: Tensor, keys: Tensor, values: Tensor, chosen: UniversalSet, mask: Tensor, scale: float
    ) -> Slots:
        """The best keys and the centroids."""
        budget = chosen.index.shape[-1]
        best = heavy_count(budget, self.heavy)
        wide = keys.to(torch.promote_types(keys.dtype, torch.float32))
        with torch.no_grad():
            light = light_keys(chosen, best, mask)
            seeds, usable = chosen.index[..., best:], chosen.valid[..., best:]
            belongs = k_means(wide, light, gather_rows(wide, seeds), usable, self.iterations)
            share = belongs / belongs.sum(-2, keepdim=True).clamp(min=1.0)
            counts = torch.cat([chosen.valid[..., :best].to(wide.dtype), belongs.sum(-2)], -1)
            single = one_hot(chosen.index[..., :best], keys.shape[-2]).to(wide.dtype)
            single = single * chosen.valid[..., :best, None]
            # Row c of `mean` averages the keys of slot c.
            mean = torch.cat([single, share.mT], -2)
            owner = torch.where(mean.sum(-2) > 0, mean.argmax(-2), budget)
        centres = mean @ wide
        spread = None
        if self.second_order:
            own = gather_rows(torch.cat([centres, torch.zeros_like(centres[..., :1, :])], -2), owner)
            spread = mean @ (wide - own).square()
        return Slots(centres, mean @ values.to(wide.dtype), counts.log(), owner, spread)


def k_means(points: Tensor, light: Tensor, centres: Tensor, usable: Tensor, iterations: int) -> Tensor:
    """Membership (*batch, n, c) of the light points, 0 or 1, after Lloyd's iterations from the given centres.

    Sums over a cluster are products with the membership matrix, so that they do not depend on the order of atomic
    additions. A cluster that loses all its points keeps its centre.
    """
    count = centres.shape[-2]

    def nearest() -> Tensor:
        distance = centres.square().sum(-1).unsqueeze(-2) - 2 * (points @ centres.mT)
        closest = torch.where(usable.unsqueeze(-2), distance, torch.inf).argmin(-1)
        return one_hot(closest, count).to(points.dtype) * (light & usable.any(-1, keepdim=True)).unsqueeze(-1)

    for _ in range(iterations):
        belongs = nearest()
        size = belongs.sum(-2).unsqueeze(-1)
        centres = torch.where(size > 0, belongs.mT @ points / size.clamp(min=1.0), centres)
    return nearest()


def heavy_count(budget: int, share: float) -> int:
    """How many of the slots go to the best keys; the light keys keep at least one."""
    return max(0, min(budget - 1, int(budget * share)))


def light_keys(chosen: UniversalSet, best: int, mask: Tensor) -> Tensor:
    """Which keys are visible and not among the `best` first ones of the set, (*batch, n)."""
    index, valid = chosen.index[..., :best], chosen.valid[..., :best]
    taken = torch.zeros(mask.shape, dtype=torch.int32, device=mask.device).scatter_add(-1, index, valid.int())
    return mask & (taken == 0)


def key_slots(keys: Tensor, values: Tensor, index: Tensor, log_weight: Tensor) -> Slots:
    """Slots that are single keys; those of weight −inf are empty, whatever their index."""
    n, c = keys.shape[-2], index.shape[-1]
    wide = torch.promote_types(keys.dtype, torch.float32)
    usable = log_weight > -torch.inf
    owner = torch.full((*index.shape[:-1], n + 1), c, dtype=torch.int64, device=index.device)
    slot = torch.arange(c, device=index.device).expand(index.shape)
    owner = owner.scatter(-1, torch.where(usable, index, n), slot)[..., :n]
    rows, held = gather_rows(keys, index).to(wide), gather_rows(values, index).to(wide)
    return Slots(rows, held, log_weight.to(wide), owner)


def _require_share(heavy: float) -> None:
    if not 0.0 <= heavy < 1.0:
        raise ValueError(f"heavy: expected a share in [0, 1), got {heavy}")
