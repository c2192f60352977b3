"""Clusters of keys and values, and the slot that stands for each of them.

Sums over a cluster are products with its membership matrix, (*batch, n, c) of zeros and ones, so that they do not
depend on the order of atomic additions.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from levattention._shapes import Bool, Float
from levattention.slots import gather_rows


def joint_features(
    queries: Tensor | None, keys: Tensor, values: Tensor, light: Bool[Tensor, "*batch n"], weight: float
) -> tuple[Tensor, Tensor]:
    """(x, y) with ⟨xᵢ, yⱼ⟩ the inner product in which keys and values are compared, each (*batch, n, d + e).

    Keys kᵢ, kⱼ are as far apart as their logits under these queries, (kᵢ − kⱼ)ᵀ QᵀQ (kᵢ − kⱼ), or plainly so without
    queries; values plainly; and the two parts are put on the same total variance, times weight² for the values. y is
    x under that form, so no square root of QᵀQ is needed.
    """
    shown = light.unsqueeze(-1).to(keys.dtype)
    count = shown.sum(-2, keepdim=True).clamp(min=1.0)
    k, v = ((rows - (rows * shown).sum(-2, keepdim=True) / count) * shown for rows in (keys, values))
    dual = k if queries is None else k @ (queries.mT @ queries / queries.shape[-2])
    spread_k, spread_v = ((a * b).sum((-1, -2), keepdim=True) for a, b in ((k, dual), (v, v)))
    ratio = weight**2 * torch.where(spread_v > 0, spread_k / torch.where(spread_v > 0, spread_v, 1.0), 0.0)
    return torch.cat([k, v], -1), torch.cat([dual, ratio * v], -1)


def farthest_first(points: Tensor, duals: Tensor, light: Bool[Tensor, "*batch n"], count: int) -> Tensor:
    """Seeds (*batch, count): the point farthest from the mean, then always the one farthest from all seeds so far."""
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


def k_means(points: Tensor, duals: Tensor, light: Bool[Tensor, "*batch n"], seeds: Tensor, iterations: int) -> Tensor:
    """Membership of the light points after Lloyd's iterations; a cluster that loses all its points keeps its centre."""
    centres, centre_duals = gather_rows(points, seeds), gather_rows(duals, seeds)
    shown = light.unsqueeze(-1).to(points.dtype)
    for step in range(iterations + 1):
        distance = (centres * centre_duals).sum(-1).unsqueeze(-2) - 2 * (points @ centre_duals.mT)
        belongs = one_hot(distance.argmin(-1), seeds.shape[-1]).to(points.dtype) * shown
        if step < iterations:
            size = belongs.sum(-2).unsqueeze(-1)
            means = belongs.mT @ torch.cat([points, duals], -1) / size.clamp(min=1.0)
            centres = torch.where(size > 0, means[..., : points.shape[-1]], centres)
            centre_duals = torch.where(size > 0, means[..., points.shape[-1] :], centre_duals)
    return belongs


def tangent_slots(
    keys: Tensor,
    values: Tensor,
    belongs: Float[Tensor, "*batch n c"],
    at: Float[Tensor, "*batch c d"],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(key, value, log weight) of each cluster's slot, exact at the cluster's query `at` and tangent there.

    pᵢ ∝ exp(scale·at·kᵢ) on the cluster; key Σpᵢkᵢ, value Σpᵢvᵢ, log weight log Σᵢexp(scale·at·kᵢ) − scale·at·key.
    At = 0 these are the means and the logarithm of the count; −inf for an empty cluster.
    """
    logits = scale * (keys * (belongs @ at)).sum(-1)
    with torch.no_grad():
        peak = torch.where(belongs > 0, logits.unsqueeze(-1), -torch.inf).amax(-2)
        full = peak > -torch.inf
        peak = torch.where(full, peak, 0.0)
        own_peak = (belongs @ peak.unsqueeze(-1)).squeeze(-1)
    mass = belongs.mT * (logits - own_peak).exp().unsqueeze(-2)
    total = mass.sum(-1, keepdim=True)
    share = mass / torch.where(full.unsqueeze(-1), total, 1.0)
    centre = share @ keys
    log_total = torch.where(full, total.squeeze(-1), 1.0).log() + peak
    log_weight = torch.where(full, log_total - scale * (at * centre).sum(-1), -torch.inf)
    return centre, share @ values, log_weight


def slot_queries(
    queries: Tensor, query_mask: Tensor, keys: Tensor, values: Tensor, log_weight: Tensor, *, scale: float
) -> Float[Tensor, "*batch c d"]:
    """The mean query of each slot, each query counting by the attention it pays to the slot."""
    # A head without any key has only slots of weight −inf, of which no softmax can be taken.
    usable = (log_weight > -torch.inf).any(-1, keepdim=True)
    log_weight = torch.where(usable, log_weight, 0.0)
    share = (scale * queries @ keys.mT + log_weight.unsqueeze(-2)).softmax(-1) * query_mask.unsqueeze(-1).to(keys.dtype)
    total = share.sum(-2).unsqueeze(-1)
    return share.mT @ queries / total.clamp(min=torch.finfo(keys.dtype).tiny)
