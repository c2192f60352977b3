"""What stands for the light keys, those outside the universal set: nothing, a weighted sample, weighted centroids.

Each spends the same budget of k slots, whatever stands in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from levattention.clusters import Members, centred, joint_features, k_means, slot_queries, tangent_slots
from levattention.query_groups import bisect
from levattention.scorers import Random
from levattention.select import scored
from levattention.slots import Slots, gather_rows, regrouped
from levattention.universal import UniversalSet, best_first

__all__ = ["Cluster", "Drop", "Residual", "Sample"]


@runtime_checkable
class Residual(Protocol):
    """Turns the queries, keys and values of a head, and its best keys, into slots to attend to.

    Whatever it chooses it must choose without gradients, and never a key outside the mask.
    """

    def best(self, budget: int) -> int:
        """How many of the budget's slots hold the best keys as they are; if 0, keys need not be scored."""
        ...

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        chosen: UniversalSet,
        mask: Tensor,
        query_mask: Tensor,
        scale: float,
    ) -> Slots:
        """The slots.

        Args:
            queries: (*batch, m, d).
            keys: (*batch, n, d), zero outside the mask.
            values: (*batch, n, e), likewise.
            chosen: the k best keys, best first.
            mask: which keys may be seen, (*batch, n).
            query_mask: which queries are real, (*batch, m).
            scale: of the inner products.
        """
        ...


@dataclass(frozen=True)
class Drop:
    """Light keys are left out, as in the paper: k keys, each of weight 1."""

    def best(self, budget: int) -> int:
        """All of them."""
        return budget

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        chosen: UniversalSet,
        mask: Tensor,
        query_mask: Tensor,
        scale: float,
    ) -> Slots:
        """The chosen keys themselves."""
        return chosen_slots(keys, values, chosen)


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

    def best(self, budget: int) -> int:
        """The heavy share, rounded down."""
        return int(budget * self.heavy)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        chosen: UniversalSet,
        mask: Tensor,
        query_mask: Tensor,
        scale: float,
    ) -> Slots:
        """The best keys and the drawn ones."""
        budget = chosen.index.shape[-1]
        best = self.best(budget)
        with torch.no_grad():
            light = light_keys(chosen, best, mask)
            draw = torch.where(light, scored(Random(self.seed), keys, None), -1.0)
            drawn = best_first(draw, budget - best)
            usable = light.gather(-1, drawn)
            size = light.sum(-1, keepdim=True).double()
            inverse = (size / usable.sum(-1, keepdim=True).clamp(min=1)).expand(drawn.shape)
            weight = torch.cat([chosen.valid[..., :best].double(), inverse * usable], -1)
            index = torch.cat([chosen.index[..., :best], drawn], -1)
        return key_slots(keys, values, index, weight.log())


@dataclass(frozen=True)
class Cluster:
    """Every slot stands for a cluster of keys that are alike, both as keys to these queries and in their values.

    Clusters come from k-means on keys and values together, seeded at the points farthest from each other, so nothing
    is random and an outlying key ends up alone in its slot, kept exactly. A slot is the tangent of its cluster C at
    the mean query a of those that attend to it: with pᵢ ∝ exp(s·a·kᵢ) on C, its key is Σpᵢkᵢ, its value Σpᵢvᵢ, and
    its weight makes Σ_C exp(s·q·kᵢ) right at q = a, to first order around it. Queries come in groups that are alike,
    and each group has tangents of its own: a query sees the budget's slots, a head holds `groups` times as many.
    O(n(k + groups + d)d) work, no n × n matrix. Gradients reach queries, keys and values through the tangents.

    Softmax only. Not causal: a cluster holds keys from everywhere.

    Attributes:
        heavy: share of the budget for the best keys by the scorer, kept out of the clusters. 0 by default: it helps
            nothing where it was measured, and the keys need not be scored.
        iterations: of k-means.
        tangents: how often the mean query of each slot is found anew; 0 leaves plain means with weight |C|.
        values: weight of the values, relative to the keys, in the distance.
        use_queries: whether the distance between keys is that of their logits under these queries. Without queries
            (and with tangents=0) the slots depend on keys and values alone, as a cache of keys needs.
        groups: of queries, a power of two; 1 gives all queries the same slots, as having no tangents does.
    """

    heavy: float = 0.0
    iterations: int = 1
    tangents: int = 2
    values: float = 1.0
    use_queries: bool = True
    groups: int = 8

    def __post_init__(self) -> None:
        _require_share(self.heavy)
        if min(self.iterations, self.tangents, self.values) < 0:
            raise ValueError(f"expected iterations, tangents and values of at least 0, got {self}")
        if self.groups < 1 or self.groups & (self.groups - 1):
            raise ValueError(f"groups: expected a power of two, got {self.groups}")

    def best(self, budget: int) -> int:
        """The heavy share, rounded down."""
        return int(budget * self.heavy)

    def __call__(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        chosen: UniversalSet,
        mask: Tensor,
        query_mask: Tensor,
        scale: float,
    ) -> Slots:
        """The best keys and the clusters of the others."""
        dtype = torch.promote_types(keys.dtype, torch.float32)
        queries, keys, values = (x.to(dtype) for x in (queries, keys, values))
        with torch.no_grad():
            members = self._members(queries, keys, values, chosen, mask, query_mask)
            order = self._order(queries, keys, mask, query_mask)
        own, real = regrouped(queries, order), regrouped(query_mask.unsqueeze(-1), order).squeeze(-1)
        at = keys.new_zeros(*keys.shape[:-2], 1, members.count, keys.shape[-1])
        rows, held, log_weight = tangent_slots(keys, values, members, at, scale)
        for _ in range(self.tangents):
            at = slot_queries(own, real, rows, log_weight, scale)
            rows, held, log_weight = tangent_slots(keys, values, members, at, scale)
        if order is None:
            rows, held, log_weight = rows.squeeze(-3), held.squeeze(-3), log_weight.squeeze(-2)
        return Slots(rows, held, log_weight, members.owner, order)

    def _members(
        self, queries: Tensor, keys: Tensor, values: Tensor, chosen: UniversalSet, mask: Tensor, query_mask: Tensor
    ) -> Members:
        """The best keys, each in a slot of its own, and the clusters of the others after them."""
        budget = chosen.index.shape[-1]
        best = self.best(budget)
        light = light_keys(chosen, best, mask)
        seen = queries * query_mask.unsqueeze(-1).to(queries.dtype) if self.use_queries else None
        points, form = joint_features(seen, keys, values, light, self.values)
        owner = best + k_means(points, form, light, budget - best, self.iterations)
        single = owners(chosen.index[..., :best], chosen.valid[..., :best], keys.shape[-2], budget)
        return Members(torch.where(light, owner, single), budget)

    def _order(self, queries: Tensor, keys: Tensor, mask: Tensor, query_mask: Tensor) -> Tensor | None:
        """The places of the queries in groups of like logits; None for a single group."""
        # Beyond a group for each query there is nothing to gain.
        groups = min(self.groups, 1 << (queries.shape[-2] - 1).bit_length()) if self.tangents else 1
        if groups == 1:
            return None
        q, k = centred(queries, query_mask), centred(keys, mask)
        return bisect(q, k.mT @ k / keys.shape[-2], query_mask, groups)


def light_keys(chosen: UniversalSet, best: int, mask: Tensor) -> Tensor:
    """Which keys are visible and not among the `best` first ones of the set, (*batch, n)."""
    index, valid = chosen.index[..., :best], chosen.valid[..., :best]
    taken = torch.zeros(mask.shape, dtype=torch.int32, device=mask.device).scatter_add(-1, index, valid.int())
    return mask & (taken == 0)


def chosen_slots(keys: Tensor, values: Tensor, chosen: UniversalSet) -> Slots:
    """The keys of a set, each of weight 1."""
    return key_slots(keys, values, chosen.index, torch.where(chosen.valid, 0.0, -torch.inf))


def key_slots(keys: Tensor, values: Tensor, index: Tensor, log_weight: Tensor) -> Slots:
    """Slots that are single keys; those of weight −inf are empty, whatever their index."""
    dtype = torch.promote_types(keys.dtype, torch.float32)
    owner = owners(index, log_weight > -torch.inf, keys.shape[-2], index.shape[-1])
    rows, held = gather_rows(keys, index).to(dtype), gather_rows(values, index).to(dtype)
    return Slots(rows, held, log_weight.to(dtype), owner)


def owners(index: Tensor, usable: Tensor, n: int, none: int) -> Tensor:
    """The slot of each of n keys, `none` for a key without one, where slot c holds key index[c] if it is usable."""
    owner = torch.full((*index.shape[:-1], n + 1), none, dtype=torch.int64, device=index.device)
    slot = torch.arange(index.shape[-1], device=index.device).expand(index.shape)
    return owner.scatter(-1, torch.where(usable, index, n), slot)[..., :n]


def _require_share(heavy: float) -> None:
    if not 0.0 <= heavy < 1.0:
        raise ValueError(f"heavy: expected a share in [0, 1), got {heavy}")
