"""Search for a query that breaks a universal set: the theorems are attacked, not sampled."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Float, Float64
from levattention.losses import Loss, Power


@dataclass(frozen=True)
class Attack:
    """The heaviest weight that any tried query put on a target key.

    Attributes:
        weight: that weight.
        key: the position of the key that received it.
        query: the query.
        tried: how many queries were evaluated.
    """

    weight: float
    key: int
    query: Float64[Tensor, " d"]
    tried: int


def weights(keys: Tensor, queries: Tensor, loss: Loss) -> Tensor:
    """A = D⁻¹f(QKᵀ), rows of zeros where every f is zero."""
    values = loss(queries @ keys.mT)
    return values / values.sum(-1, keepdim=True).clamp(min=torch.finfo(values.dtype).tiny)


def attack(
    keys: Float[Tensor, "n d"],
    targets: Tensor,
    *,
    loss: Loss = Power(2),  # noqa: B008 (frozen)
    starts: Tensor | None = None,
    steps: int = 100,
    random_starts: int = 32,
    generator: torch.Generator | None = None,
) -> Attack:
    """The query found by gradient ascent that puts most weight on one of the target keys.

    Starts are the targets themselves (the query that points at a key), random directions and those given. Each
    start climbs log f(⟨q, kᵢ⟩) − log Σⱼ f(⟨q, kⱼ⟩) for the target it favours most, in coordinates in which the keys
    have unit covariance, so that ill-conditioned keys do not hide a direction from the gradient.

    Args:
        keys: (n, d).
        targets: positions whose weight is to be driven up, for instance all keys outside U.
        loss: f.
        starts: further queries to start from, (s, d).
        steps: ascent steps for each start.
        random_starts: how many random directions to add.
        generator: source of the random directions.

    Example:
        >>> found = attack(torch.eye(3).repeat(10, 1), torch.arange(30))
        >>> round(found.weight, 6)
        0.1
    """
    wide = keys.double()
    _, singular, right = torch.linalg.svd(wide, full_matrices=False)
    keep = singular > singular[0] * wide.shape[-1] * torch.finfo(torch.float64).eps
    to_query = right[keep].mT / singular[keep]
    white = wide @ to_query
    own = white[targets[:: max(1, len(targets) // 64)]]
    pool = [own, torch.randn(random_starts, white.shape[-1], generator=generator, dtype=torch.float64)]
    if starts is not None:
        pool.append(starts.double() @ right[keep].mT * singular[keep])
    queries = torch.nn.functional.normalize(torch.cat(pool), dim=-1).requires_grad_()
    with torch.no_grad():
        aim = targets[weights(white, queries, loss)[:, targets].argmax(-1)]
    best, tried = Attack(-1.0, -1, wide.new_zeros(wide.shape[-1]), 0), 0
    ascent = torch.optim.Adam([queries], lr=0.05, maximize=True)
    for _ in range(steps + 1):
        share = weights(white, queries, loss)
        with torch.no_grad():
            reached = share[:, targets].max()
            tried += len(queries)
            if reached > best.weight:
                row, column = divmod(int(share[:, targets].argmax()), len(targets))
                best = Attack(float(reached), int(targets[column]), to_query @ queries[row], tried)
        ascent.zero_grad()
        share.gather(-1, aim.unsqueeze(-1)).clamp(min=1e-300).log().sum().backward()
        ascent.step()
    return Attack(best.weight, best.key, best.query.detach(), tried)
