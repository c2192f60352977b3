"""Attention as one dense matrix of weights, by loops over heads and positions: what `attend` must reproduce."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from oracles import leverage_by_svd


def best(scores: Tensor, count: int) -> list[int]:
    """Positions of the best scores, ties to the earlier one; scores within 1e-9 of each other count as equal."""
    return sorted(range(len(scores)), key=lambda j: (-round(float(scores[j]), 9), j))[:count]


def leverage(keys: Tensor, rtol: float = 1e-6) -> Tensor:
    """Leverage of (n, d) keys; zeros for no keys at all."""
    if len(keys) == 0 or not keys.any():
        return torch.zeros(len(keys), dtype=torch.float64)
    return leverage_by_svd(keys, rtol)


def top_leverage(keys: Tensor, mask: Tensor, count: int, rtol: float = 1e-6) -> list[int]:
    """The best visible keys of one head, (n, d) and (n,)."""
    visible = mask.nonzero().squeeze(-1)
    return [int(visible[j]) for j in best(leverage(keys[visible], rtol), count)]


def above_leverage(keys: Tensor, mask: Tensor, eps: float) -> list[int]:
    """The visible keys of one head whose leverage reaches eps."""
    visible = mask.nonzero().squeeze(-1)
    return visible[leverage(keys[visible]) >= eps * (1 - 1e-9)].tolist()


def local(m: int, n: int, radius: int) -> Tensor:
    """Which keys lie within the radius of each query, the last query at the last key; none for radius 0."""
    near = torch.zeros(m, n, dtype=torch.bool)
    for i in range(m):
        for j in range(n):
            near[i, j] = radius > 0 and abs(i + n - m - j) <= radius
    return near


def manhattan(h: int, w: int, radius: int, prefix: int) -> Tensor:
    """Which tokens lie within the radius of each other on a grid; a prefix token only by itself."""
    n = prefix + h * w
    near = torch.eye(n, dtype=torch.bool)
    for i in range(h * w):
        for j in range(h * w):
            near[prefix + i, prefix + j] = abs(i // w - j // w) + abs(i % w - j % w) <= radius
    return near


def attention(q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float, f=None, total: Tensor | None = None):
    """Σⱼ Wᵢⱼ g(qᵢ·kⱼ)vⱼ / Σⱼ Wᵢⱼ g(qᵢ·kⱼ) with dense W (*batch, m, n); `total` replaces the denominator; 0/0 is 0."""
    inner = scale * (q @ k.mT)
    if f is None:
        inner = torch.where(weights > 0, inner, -torch.inf)
        peak = inner.detach().amax(-1, keepdim=True)
        values = (inner - torch.where(peak.isfinite(), peak, 0.0)).exp()
    else:
        values = f(inner)
    values = values * weights
    below = values.sum(-1, keepdim=True) if total is None else total.unsqueeze(-1)
    seen = below > 0
    return torch.where(seen, values / torch.where(seen, below, 1.0), 0.0) @ v


def causal_sets(keys: Tensor, mask: Tensor, m: int, chunk: int, top_k: int | None, eps: float | None):
    """For each chunk of queries of one head: the positions before it that it may see, and the largest score dropped."""
    n = len(keys)
    sets, dropped, kept, read = [], 0.0, [], 0
    for start in range(0, m, chunk):
        before = max(start + n - m, 0)
        if before > read:
            prefix = torch.where(mask[:before, None], keys[:before], 0.0)
            scores = leverage(prefix)
            candidates = sorted(kept) + [j for j in range(read, before) if mask[j]]
            if eps is not None:
                kept = [j for j in candidates if scores[j] >= eps * (1 - 1e-9)]
            else:
                order = [candidates[a] for a in best(scores[candidates], len(candidates))]
                kept = order[:top_k]
                # Among equal scores (d visible keys or fewer all have 1) rounding would choose, here and there.
                assert not order[top_k:] or scores[kept[-1]] - scores[order[top_k]] > 1e-9, "a tie"
                dropped = max([dropped, *(float(scores[j]) for j in order[top_k:])])
            read = before
        sets.append((list(kept), dropped))
    return sets


def cluster_slots(q, k, v, budget, scale, *, iterations=1, tangents=2, values=1.0, use_queries=True, groups=8):
    """(members of each slot, group of each query, slots) of one head; slots[g] are keys, values and log weights.

    With square roots of QᵀQ and KᵀK and loops over clusters. q (m, d), k (n, d), v (n, e): NumPy arrays of the real
    queries and visible keys alone.
    """
    x = (k - k.mean(0)) @ root(q.T @ q / len(q) if use_queries else np.eye(k.shape[1]))
    y = v - v.mean(0)
    points = np.concatenate([x, values * np.sqrt((x**2).sum() / (y**2).sum()) * y], 1)
    seeds = [int(np.argmax((points**2).sum(1)))]
    while len(seeds) < budget:
        seeds.append(int(np.argmax([min(((p - points[s]) ** 2).sum() for s in seeds) for p in points])))
    centres = points[seeds].copy()
    for step in range(iterations + 1):
        owner = np.array([np.argmin([((p - c) ** 2).sum() for c in centres]) for p in points])
        if step < iterations:
            for c in range(budget):
                if (owner == c).any():
                    centres[c] = points[owner == c].mean(0)
    members = [np.flatnonzero(owner == c) for c in range(budget)]
    members = [rows for rows in members if len(rows)]
    centred = k - k.mean(0)
    parts = halves(q @ root(centred.T @ centred), np.arange(len(q)), groups if tangents else 1)
    group = np.concatenate([np.full(len(part), g) for g, part in enumerate(parts)])[np.argsort(np.concatenate(parts))]
    slots = [tangents_at(k, v, members, np.zeros((len(members), k.shape[1])), scale)] * len(parts)
    for _ in range(tangents):
        slots = [
            tangents_at(k, v, members, attending(q[part], *own, scale), scale) if len(part) else own
            for part, own in zip(parts, slots, strict=True)
        ]
    return members, group, slots


def root(form):
    """A square root of a positive semidefinite form."""
    scales, axes = np.linalg.eigh(form)
    return axes * np.sqrt(scales.clip(0))


def halves(points, part, count):
    """A part (positions in `points`) halved until there are `count`: at the median along its farthest point."""
    if count == 1:
        return [part]
    own = points[part] - points[part].mean(0) if len(part) else points[part]
    ranked = part[np.argsort(own @ own[np.argmax((own**2).sum(1))], kind="stable")] if len(part) else part
    middle = (len(part) + 1) // 2
    return halves(points, ranked[:middle], count // 2) + halves(points, ranked[middle:], count // 2)


def tangents_at(k, v, members, at, scale):
    """Keys, values and log weights of the slots that are exact at one query each."""
    slots = []
    for rows, query in zip(members, at, strict=True):
        mass = np.exp(scale * k[rows] @ query)
        key = mass @ k[rows] / mass.sum()
        slots.append((key, mass @ v[rows] / mass.sum(), np.log(mass.sum()) - scale * query @ key))
    return tuple(np.array(x) for x in zip(*slots, strict=True))


def attending(q, keys, held, log_weight, scale):
    """The mean query of each slot."""
    share = np.exp(scale * q @ keys.T + log_weight)
    share /= share.sum(1, keepdims=True)
    return share.T @ q / share.sum(0)[:, None]
