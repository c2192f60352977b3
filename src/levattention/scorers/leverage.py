"""Leverage scores: the sensitivities of f(x) = x²."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from levattention._shapes import Float64
from levattention.checks import require_finite, require_keys
from levattention.csr import csr_pick, is_csr
from levattention.gram import Advance, Factor, Gram, factor_of_triangle, heads_first, resolve_rtol, triangle
from levattention.losses import Power

Route = Literal["auto", "gram", "qr", "svd"]


@dataclass(frozen=True)
class LeverageReport:
    """The scores, and how they were found.

    Attributes:
        scores: τ, (*batch, n).
        rank: numerical rank of the keys, (*batch,).
        condition: κ of the keys on their row space, (*batch,).
        route: "gram", "qr" or "svd"; "mixed" where some batch elements needed QR and others did not.
    """

    scores: Float64[Tensor, "*batch n"]
    rank: Tensor
    condition: Tensor
    route: str


@dataclass(frozen=True)
class Leverage:
    """τᵢ = kᵢᵀ(KᵀK)⁺kᵢ, the largest weight key i can receive under f(x) = x² (Theorem thm-0 of the paper).

    Attributes:
        rtol: see `leverage_scores`.
        route: "auto" forms the Gram and goes over to QR where the keys are ill-conditioned; "gram" and "qr" force
            one of them; "svd" is the reference, and needs a copy of the keys in fp64.

    Example:
        >>> Leverage()(torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 1.0]]))
        tensor([0.3600, 0.6400, 1.0000], dtype=torch.float64)
    """

    rtol: float | Literal["exact"] | None = None
    route: Route = "auto"

    certified: ClassVar[bool] = True

    def __call__(self, keys: Tensor) -> Float64[Tensor, "*batch n"]:
        """τ of every key."""
        return self.report(keys).scores

    def report(self, keys: Tensor, advance: Advance | None = None) -> LeverageReport:
        """τ of every key, with the rank, the condition number and the route taken."""
        require_keys(keys)
        if self.route == "svd":
            return svd_scores(keys, self.rtol)
        factor, route = factor_keys(keys, self.rtol, self.route, advance)
        return LeverageReport(factor.leverage(keys, advance), factor.rank, factor.condition, route)

    def bound(self, d: int, n: int) -> float:
        """Σᵢ τᵢ = rank ≤ min(n, d)."""
        return Power(2).total_sensitivity(d, n)


def leverage_scores(keys: Tensor, *, rtol: float | Literal["exact"] | None = None) -> Float64[Tensor, "*batch n"]:
    """Leverage scores τᵢ = kᵢᵀ(KᵀK)⁺kᵢ in fp64, each in [0, 1], summing to rank(K).

    τᵢ is the largest share of Σⱼ⟨q, kⱼ⟩² that key i can have, over all queries q.

    Args:
        keys: (*batch, n, d), fp16, bf16, fp32 or fp64, or a two-dimensional `torch.sparse_csr` tensor.
        rtol: singular values at most rtol times the largest count as zero. Default: four roundings of the
            input dtype. "exact" takes the keys as stored.

    Raises:
        ValueError: keys that are empty, not floating, or not finite (names the first bad row).

    Example:
        >>> leverage_scores(torch.eye(2).repeat(2, 1))
        tensor([0.5000, 0.5000, 0.5000, 0.5000], dtype=torch.float64)
    """
    return Leverage(rtol=rtol)(keys)


def witness(keys: Tensor, index: int | Tensor) -> Tensor:
    """The query y = (KᵀK)⁺kᵢ at which key i attains its leverage score: ⟨y, kᵢ⟩² = τᵢ·‖Ky‖².

    Args:
        keys: (*batch, n, d).
        index: a position, which gives (*batch, d), or positions (*batch, c), which give (*batch, c, d).

    Example:
        >>> witness(torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 1.0]]), 1)
        tensor([0.1600, 0.0000], dtype=torch.float64)
    """
    require_keys(keys)
    n, d = keys.shape[-2:]
    positions = torch.as_tensor(index, device=keys.device)
    if positions.numel() and (int(positions.min()) < 0 or int(positions.max()) >= n):
        raise ValueError(f"index: expected positions in [0, {n}), got {index}")
    factor, _ = factor_keys(keys)
    single = positions.ndim == 0
    if single:
        positions = positions.expand(*keys.shape[:-2], 1)
    if is_csr(keys):
        rows = csr_pick(keys, positions).double()
    else:
        rows = keys.gather(-2, positions.unsqueeze(-1).expand(*positions.shape, d)).double()
    queries = rows @ factor.whitener @ factor.whitener.mT
    return queries.squeeze(-2) if single else queries


def factor_keys(
    keys: Tensor,
    rtol: float | Literal["exact"] | None = None,
    route: Route = "auto",
    advance: Advance | None = None,
) -> tuple[Factor, str]:
    """The whitener of the keys, and the route that gave it: the Gram, or QR for each ill-conditioned element."""
    gram = Gram.of(keys, advance=advance)
    if not gram.matrix.isfinite().all():
        require_finite(keys)
        largest = (keys.values() if is_csr(keys) else keys).abs().max().item()
        raise ValueError(f"keys: entries up to {largest:.3g} overflow when squared; rescale them")
    factor = gram.factor(rtol)
    if route == "gram":
        return factor, "gram"
    shape, d = factor.rank.shape, keys.shape[-1]
    redo = torch.ones_like(factor.ill_conditioned) if route == "qr" else factor.ill_conditioned
    flat = [keys] if is_csr(keys) else heads_first(keys)
    which = redo.reshape(-1).nonzero().squeeze(-1).tolist()
    if not which:
        return factor, "gram"
    whitener, rank, condition = factor.whitener.reshape(-1, d, d), factor.rank.reshape(-1), factor.condition.reshape(-1)
    for i in which:
        exact = factor_of_triangle(triangle(flat[i], advance), gram.input_eps, rtol)
        whitener[i], rank[i], condition[i] = exact.whitener, exact.rank, exact.condition
    settled = Factor(whitener.reshape(*shape, d, d), rank.reshape(shape), condition.reshape(shape), redo & False)
    return settled, "qr" if len(which) == len(flat) else "mixed"


def svd_scores(keys: Tensor, rtol: float | Literal["exact"] | None = None) -> LeverageReport:
    """The reference: squared row norms of the left singular vectors."""
    require_finite(keys)
    if is_csr(keys):
        raise ValueError("route: 'svd' needs dense keys; sparse keys take 'auto', 'gram' or 'qr'")
    left, singular, _ = torch.linalg.svd(keys.double(), full_matrices=False)
    tolerance = resolve_rtol(rtol, torch.finfo(keys.dtype).eps, keys.shape[-1])
    keep = singular > singular[..., :1] * tolerance
    scores = (left * keep.unsqueeze(-2)).square().sum(-1).clamp(max=1.0)
    lowest = torch.where(keep, singular, singular[..., :1]).amin(-1)
    condition = torch.where(lowest > 0, singular[..., 0] / lowest, 1.0)
    return LeverageReport(scores, keep.sum(-1), condition, "svd")
