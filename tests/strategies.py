"""Hard matrices: conditioned, rank-deficient, heavy-tailed, with zero and duplicate rows, at many scales."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor


def conditioned(n: int, d: int, kappa: float, seed: int = 0) -> Tensor:
    """n × d keys in fp64 with singular values spread evenly, in the log, from 1 to 1/κ."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n, d, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64)).Q
    singular = torch.logspace(0, -torch.log10(torch.tensor(kappa)).item(), d, dtype=torch.float64)
    return left * singular @ right.mT


def deficient(n: int, d: int, rank: int, seed: int = 0) -> Tensor:
    """n × d keys in fp64 of the given rank."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(n, rank, generator=generator, dtype=torch.float64)
    return left @ torch.randn(rank, d, generator=generator, dtype=torch.float64)


def heavy_tailed(n: int, d: int, seed: int = 0) -> Tensor:
    """Student-t entries with 1.5 degrees of freedom, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, d, generator=generator, dtype=torch.float64)
    chi = torch.empty(n, d, dtype=torch.float64)
    chi = torch._standard_gamma(chi.fill_(0.75), generator=generator) * 2
    return normal / (chi / 1.5).sqrt()


def spikes(n: int, d: int, seed: int = 0) -> Tensor:
    """Ten times the identity, then rows of noise at 1e-3, in fp64."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(n, d, generator=generator, dtype=torch.float64) * 1e-3
    keys[:d] = 10 * torch.eye(d, dtype=torch.float64)
    return keys


@st.composite
def keys(draw: st.DrawFn, max_n: int = 40, max_d: int = 6) -> Tensor:
    """Small fp64 keys with zero rows, duplicate rows and scales from 1e-6 to 1e6 mixed in."""
    n, d = draw(st.integers(1, max_n)), draw(st.integers(1, max_d))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    matrix = torch.randn(n, d, generator=generator, dtype=torch.float64)
    if draw(st.booleans()):
        matrix[torch.randint(n, (max(1, n // 4),), generator=generator)] = 0
    if draw(st.booleans()):
        matrix[torch.randint(n, (max(1, n // 3),), generator=generator)] = matrix[0].clone()
    if draw(st.booleans()) and d > 1:
        matrix[:, -1] = matrix[:, 0]
    return matrix * 10.0 ** draw(st.integers(-6, 6))
