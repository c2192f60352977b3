"""Clusters of keys and values, and the slot that stands for each of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from levattention._shapes import Bool, Float, Int64
from levattention.slots import gather_rows

# Keys for each cluster from which seeds and centres are found, and at least how many in all.
ROWS_PER_SEED = 16
SEED_ROWS = 1024


class Members:
    """Which cluster each key belongs to, and sums over the clusters.

    The keys are sorted by cluster once, so that sums need neither a matrix of zeros and ones nor atomic additions.

    Args:
        owner: the cluster of each key, (*batch, n); `count` for a key that belongs to none.
        count: how many clusters there are.
    """

    def __init__(self, owner: Int64[Tensor, "*batch n"], count: int) -> None:
        self.owner, self.count = owner, count
        heads = math.prod(owner.shape[:-1])
        first = torch.arange(heads, device=owner.device).unsqueeze(-1) * (count + 1)
        # Clusters, and those of no cluster after them, are counted through over the batch.
        cluster = (owner.reshape(heads, owner.shape[-1]) + first).reshape(-1)
        self._by_cluster = cluster.argsort(stable=True)
        every = torch.arange(heads * (count + 1), device=owner.device)
        self._starts = torch.searchsorted(cluster[self._by_cluster], every)

    def sums(self, rows: Float[Tensor, "*batch n w"]) -> Float[Tensor, "*batch c w"]:
        """The sum of the rows of each cluster."""
        sums = embedding_bag(self._by_cluster, rows.flatten(0, -2), self._starts, mode="sum")
        return sums.view(*rows.shape[:-2], self.count + 1, rows.shape[-1])[..., :-1, :]

    def weighted_sums(
        self, rows: Float[Tensor, "*batch n w"], weights: Float[Tensor, "*batch g n"]
    ) -> Float[Tensor, "*batch g c w"]:
        """The sum of the rows of each cluster under each of g weightings; no row is written times its weight."""
        groups, entries = weights.shape[-2], len(self._by_cluster)
        starts = self._starts + entries * torch.arange(groups, device=rows.device).unsqueeze(-1)
        each = weights.movedim(-2, 0).reshape(groups, entries)[:, self._by_cluster].reshape(-1)
        flat = rows.flatten(0, -2)
        index = self._by_cluster.repeat(groups)
        sums = embedding_bag(index, flat, starts.reshape(-1), mode="sum", per_sample_weights=each)
        return sums.view(groups, *rows.shape[:-2], self.count + 1, rows.shape[-1])[..., :-1, :].movedim(0, -3)

    def rows(self, of: Float[Tensor, "*batch c w"]) -> Float[Tensor, "*batch n w"]:
        """The row of each key's cluster; zeros for a key that belongs to none."""
        return gather_rows(pad(of, (0, 0, 0, 1)), self.owner)

    def peaks(self, entries: Float[Tensor, "*batch g n"]) -> tuple[Tensor, Tensor]:
        """The largest entry of each cluster, (*batch, g, c), −inf for an empty one; and that of each key's cluster."""
        owner = self.owner.unsqueeze(-2).expand(entries.shape)
        lowest = entries.new_full((*entries.shape[:-1], self.count + 1), -torch.inf)
        peaks = lowest.scatter_reduce(-1, owner, entries, "amax")
        return peaks[..., :-1], peaks.gather(-1, owner)


def joint_features(
    queries: Tensor | None, keys: Tensor, values: Tensor, light: Bool[Tensor, "*batch n"], weight: float
) -> tuple[Float[Tensor, "*batch n w"], Float[Tensor, "*batch w w"]]:
    """Points x (key and value in a row, less their means) and the form A under which they are compared, xᵀAx.

    Keys kᵢ, kⱼ are as far apart as their logits under these queries, (kᵢ − kⱼ)ᵀ QᵀQ (kᵢ − kⱼ), or plainly so without
    queries; values plainly; and the two parts are put on the same total variance, times weight² for the values.
    """
    d, e = keys.shape[-1], values.shape[-1]
    k, v = centred(keys, light), centred(values, light)
    plain = torch.eye(d + e, dtype=keys.dtype, device=keys.device)
    if queries is None:
        of_keys, spread_k = plain[:d, :d], k.square().sum((-1, -2), keepdim=True)
    else:
        of_keys = queries.mT @ queries / queries.shape[-2]
        spread_k = ((k.mT @ k) * of_keys).sum((-1, -2), keepdim=True)
    spread_v = v.square().sum((-1, -2), keepdim=True)
    ratio = weight**2 * torch.where(spread_v > 0, spread_k / torch.where(spread_v > 0, spread_v, 1.0), 0.0)
    form = ratio * plain
    form[..., :d, :d] = of_keys
    return torch.cat([k, v], -1), form


def centred(rows: Float[Tensor, "*batch n w"], light: Bool[Tensor, "*batch n"]) -> Float[Tensor, "*batch n w"]:
    """The light rows less their mean, and zeros for the others."""
    shown = light.unsqueeze(-1).to(rows.dtype)
    return (rows - (rows * shown).sum(-2, keepdim=True) / shown.sum(-2, keepdim=True).clamp(min=1.0)) * shown


def k_means(
    points: Float[Tensor, "*batch n w"],
    form: Float[Tensor, "*batch w w"],
    light: Bool[Tensor, "*batch n"],
    count: int,
    iterations: int,
) -> Int64[Tensor, "*batch n"]:
    """The cluster of each light point, `count` for the others: Lloyd's iterations from the seeds farthest apart.

    With many points seeds and centres are found from some of them, then all are assigned.
    """
    some, usable, enough = points, light, max(SEED_ROWS, ROWS_PER_SEED * count)
    if points.shape[-2] > enough:
        index = outliers_and_others(points, form, light, enough)
        some, usable = gather_rows(points, index), light.gather(-1, index)
    centres = gather_rows(some, farthest_first(some, form, usable, count))
    shown = usable.unsqueeze(-1).to(some.dtype)
    for _ in range(iterations):
        members = Members(nearest(some, form, centres, usable), count)
        size = members.sums(shown)
        # A cluster that loses all its points keeps its centre.
        centres = torch.where(size > 0, members.sums(some) / size.clamp(min=1.0), centres)
    return nearest(points, form, centres, light)


def outliers_and_others(
    points: Tensor, form: Tensor, light: Bool[Tensor, "*batch n"], size: int
) -> Int64[Tensor, "*batch s"]:
    """Positions of the light points farthest from the mean, and of as many evenly spaced ones."""
    far = torch.where(light, squares(points, form), -torch.inf).topk(size // 2).indices
    before = light.cumsum(-1)
    step = torch.arange(size - size // 2, device=light.device)
    even = torch.searchsorted(before, step * before[..., -1:] // len(step) + 1)
    return torch.cat([far, even.clamp(max=light.shape[-1] - 1)], -1)


def squares(points: Float[Tensor, "*batch n w"], form: Float[Tensor, "*batch w w"]) -> Float[Tensor, "*batch n"]:
    """xᵀAx of every point."""
    return (points @ form * points).sum(-1)


def farthest_first(points: Tensor, form: Tensor, light: Bool[Tensor, "*batch n"], count: int) -> Tensor:
    """Seeds (*batch, count): the point farthest from the mean, then always the one farthest from all seeds so far."""
    duals = points @ form
    own = (points * duals).sum(-1)
    gap = torch.where(light, own, -torch.inf)
    seeds = []
    for step in range(count):
        seed = gap.argmax(-1, keepdim=True)
        seeds.append(seed)
        inner = (points @ gather_rows(duals, seed).mT).squeeze(-1)
        distance = own + own.gather(-1, seed) - 2 * inner
        gap = torch.where(light, distance if step == 0 else torch.minimum(gap, distance), -torch.inf)
    return torch.cat(seeds, -1)


def nearest(
    points: Tensor, form: Tensor, centres: Float[Tensor, "*batch c w"], light: Bool[Tensor, "*batch n"]
) -> Int64[Tensor, "*batch n"]:
    """The centre nearest to each light point; c for the others."""
    duals = centres @ form
    distance = (centres * duals).sum(-1).unsqueeze(-2) - 2 * (points @ duals.mT)
    return torch.where(light, distance.argmin(-1), centres.shape[-2])


def tangent_slots(
    keys: Tensor, values: Tensor, members: Members, at: Float[Tensor, "*batch g c d"], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, value, log weight) of each cluster's slot for g groups of queries, (*batch, g, c, ·).

    A slot is exact at its group's query `at` and tangent there: pᵢ ∝ exp(scale·at·kᵢ) on the cluster; key Σpᵢkᵢ, value
    Σpᵢvᵢ, log weight log Σᵢexp(scale·at·kᵢ) − scale·at·key. At = 0 these are the means and the logarithm of the count;
    −inf for an empty cluster.
    """
    d = keys.shape[-1]
    logits = scale * torch.stack([(keys * members.rows(query)).sum(-1) for query in at.unbind(-3)], -2)
    with torch.no_grad():
        peak, own_peak = members.peaks(logits)
        full = peak > -torch.inf
    # Keys, values, and a column of ones, whose sums are the totals.
    sums = members.weighted_sums(pad(torch.cat([keys, values], -1), (0, 1), value=1.0), (logits - own_peak).exp())
    total = torch.where(full, sums[..., -1], 1.0)
    means = sums[..., :-1] / total.unsqueeze(-1)
    centre = means[..., :d]
    log_weight = total.log() + torch.where(full, peak, 0.0) - scale * (at * centre).sum(-1)
    return centre, means[..., d:], torch.where(full, log_weight, -torch.inf)


def slot_queries(
    queries: Float[Tensor, "*batch g m d"],
    real: Bool[Tensor, "*batch g m"],
    keys: Tensor,
    log_weight: Tensor,
    scale: float,
) -> Float[Tensor, "*batch g c d"]:
    """The mean query of each slot in each group, each query counting by the attention it pays to the slot."""
    # A head without any key has only slots of weight −inf, of which no softmax can be taken.
    usable = log_weight > -torch.inf
    some = usable.any(-1, keepdim=True)
    share = (scale * queries @ keys.mT + torch.where(some, log_weight, 0.0).unsqueeze(-2)).log_softmax(-1)
    # Which share of a slot's attention each query pays. In logarithms: all of it may be too small to divide by.
    counts = real.unsqueeze(-1) & (usable | ~some).unsqueeze(-2)
    mean = torch.where(counts, share, torch.finfo(keys.dtype).min).softmax(-2) * counts
    return mean.mT @ queries
