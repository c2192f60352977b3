"""Brute force over queries for Huber and Tukey: every direction and every length, sharing no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def huber(z: Tensor) -> Tensor:
    return torch.where(z.abs() > 1, 2 * z.abs() - 1, z * z)


def huber_kinked(z: Tensor) -> Tensor:
    return torch.where(z.abs() > 1, z.abs(), z * z)


def tukey(z: Tensor) -> Tensor:
    return torch.where(z.abs() > 1, 1.0, z * z)


def directions(keys: Tensor, count: int = 400) -> Tensor:
    """Unit vectors of the plane: evenly spaced, and on either side of the normal of every key.

    Tukey's and Huber's shares peak where other keys drop out, that is next to their normals.
    """
    even = torch.arange(count, dtype=torch.float64) * math.pi / count
    normals = torch.atan2(keys[:, 1], keys[:, 0]) + math.pi / 2
    near = torch.cat([normals + offset for offset in (0.0, 1e-9, -1e-9, 1e-6, -1e-6, 1e-3, -1e-3)])
    angles = torch.cat([even, near])
    return torch.stack([angles.cos(), angles.sin()], -1)


def best_shares(keys: Tensor, queries: Tensor, f, sizes: Tensor) -> Tensor:
    """max over queries and over sizes t of f(t)/Σⱼ f(t·zⱼ/zᵢ), for each key i; (n, d) and (m, d) -> (n,)."""
    z = queries.double() @ keys.double().mT
    best = torch.zeros(len(keys), dtype=torch.float64)
    for i in range(len(keys)):
        mine = z[:, i].abs()
        usable = mine > 1e-12 * z.abs().amax(-1).clamp(min=1e-300)
        ratio = z[usable] / mine[usable].unsqueeze(-1)
        for size in sizes:
            share = f(size) / f(size * ratio).sum(-1)
            if len(share):
                best[i] = torch.maximum(best[i], share.max())
    return best


TUKEY_SIZES = torch.ones(1, dtype=torch.float64)
HUBER_SIZES = torch.logspace(-3, 6, 37, base=10, dtype=torch.float64)
