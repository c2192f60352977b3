"""Queries of the planted model: chosen relevant keys, weights and noise, held to (w-bounds) and (z-small)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from levattention._shapes import Float, Float64, Int64
from levattention.checks import require_finite
from levattention.gram import heads_first, tiles
from levattention.planted.assumptions import at_most, most_relevant, require_matrix, require_positions


@dataclass(frozen=True)
class Queries:
    """q = Σ wⱼKⱼ + z for m queries, and what each was made of.

    Attributes:
        vectors: the queries, fp64.
        relevant: S(q) of each, sorted positions.
        weights: w of each, in the order of its relevant keys.
        noise: z of each.
        delta1: the δ1 whose bounds they keep.
    """

    vectors: Float64[Tensor, "m d"]
    relevant: list[Tensor]
    weights: list[Tensor]
    noise: Float64[Tensor, "m d"]
    delta1: float

    def __len__(self) -> int:
        return len(self.relevant)


def queries(
    keys: Tensor,
    standout: Tensor,
    relevant: Sequence[Any],
    *,
    delta1: float,
    weights: Sequence[Any] | None = None,
    noise: float | Tensor = 1.0,
    generator: torch.Generator | None = None,
) -> Queries:
    """Queries q = Σ_{j∈S(q)} wⱼKⱼ + z that keep the model's bounds.

    The bounds are (w-bounds), wⱼ ≥ 4δ1 and Σwⱼ ≤ 1, and (z-small), |⟨z, Kₗ⟩| ≤ (δ1/4)‖Kₗ‖² for every key l. Weights
    and noise that are given are held to them; those that are drawn keep them by construction: each weight gets 4δ1
    and a random part of what is left, and z is a random direction scaled until its largest |⟨z, Kₗ⟩|/‖Kₗ‖² is
    noise · δ1/4.

    Args:
        keys: (n, d).
        standout: positions of S.
        relevant: S(q) for each of m queries: positions in S, each once; may be empty.
        delta1: δ1 of the keys, or any larger value up to ¼.
        weights: w for each query; drawn where left out.
        noise: how much of the allowed noise to use, in [0, 1]; or the z themselves, (m, d).
        generator: source of the weights and the noise.

    Raises:
        ValueError: a relevant set that is no subset of S or too large for δ1 (4δ1·|S(q)| > 1), weights or noise out
            of bounds.

    Example:
        >>> keys = torch.eye(4)
        >>> made = queries(keys, torch.arange(4), [[0, 2]], delta1=0.1, weights=[[0.4, 0.6]], noise=0.0)
        >>> [round(x, 6) for x in made.vectors[0].tolist()]
        [0.4, 0.0, 0.6, 0.0]
    """
    flat = require_matrix(keys)
    members = require_positions(standout, flat)
    delta1 = require_delta1(delta1)
    chosen = [require_relevant(positions, members, flat, delta1) for positions in relevant]
    if weights is None:
        drawn = [draw_weights(len(positions), delta1, generator).to(flat.device) for positions, _ in chosen]
    elif len(weights) != len(chosen):
        raise ValueError(f"weights: expected one list for each of {len(chosen)} queries, got {len(weights)}")
    else:
        drawn = [
            require_weights(given, len(positions), delta1, flat)[order]
            for given, (positions, order) in zip(weights, chosen, strict=True)
        ]
    found = [positions for positions, _ in chosen]
    z = place_noise(flat, noise, len(found), delta1, generator)
    vectors = z.clone()
    for row, (positions, w) in enumerate(zip(found, drawn, strict=True)):
        vectors[row] += w @ flat[positions].double()
    return Queries(vectors, found, drawn, z, delta1)


def require_delta1(delta1: Any) -> float:
    """δ1 as a float in (0, ¼]."""
    value = float(delta1)
    if not 0.0 < value < float("inf"):
        raise ValueError(f"delta1: expected a number in (0, 1/4], got {delta1}")
    if not at_most(value, 0.25):
        raise ValueError(
            f"delta1: expected a number in (0, 1/4], got {value:.4g}: a relevant key needs weight ≥ 4δ1 = "
            f"{4 * value:.4g}, and weights sum to at most 1, so no query can have one"
        )
    return value


def require_relevant(
    given: Any, members: Tensor, keys: Tensor, delta1: float
) -> tuple[Int64[Tensor, " r"], Int64[Tensor, " r"]]:
    """S(q) sorted, and the order that sorted it."""
    if not len(given):
        nothing = torch.zeros(0, dtype=torch.int64, device=keys.device)
        return nothing, nothing
    positions, order = require_positions(given, keys, "relevant").sort()
    outside = positions[~torch.isin(positions, members)]
    if len(outside):
        raise ValueError(f"relevant: key {int(outside[0])} is not in the stand-out set")
    if len(positions) > most_relevant(delta1):
        raise ValueError(
            f"relevant: {len(positions)} keys in one query need weights ≥ 4δ1 = {4 * delta1:.4g} each, which sum to "
            f"{4 * delta1 * len(positions):.4g} > 1; δ1 = {delta1:.4g} allows at most {most_relevant(delta1)}"
        )
    return positions, order


def draw_weights(count: int, delta1: float, generator: torch.Generator | None) -> Float64[Tensor, " r"]:
    """Random weights ≥ 4δ1 whose sum is a random number up to 1."""
    device = None if generator is None else generator.device
    shares = torch.empty(count + 1, dtype=torch.float64, device=device).exponential_(generator=generator)
    return 4 * delta1 + max(0.0, 1 - 4 * delta1 * count) * shares[:count] / shares.sum()


def require_weights(given: Any, count: int, delta1: float, keys: Tensor) -> Float64[Tensor, " r"]:
    """w in fp64, once it is known to keep (w-bounds)."""
    w = torch.as_tensor(given, dtype=torch.float64, device=keys.device)
    if w.shape != (count,):
        raise ValueError(f"weights: expected {count} numbers for {count} relevant keys, got shape {tuple(w.shape)}")
    if count and not at_most(4 * delta1, float(w.min())):
        raise ValueError(f"weights: expected each ≥ 4δ1 = {4 * delta1:.4g}, got {float(w.min()):.4g}")
    if not at_most(float(w.sum()), 1.0):
        raise ValueError(f"weights: expected a sum of at most 1, got {float(w.sum()):.4g}")
    return w


def place_noise(
    keys: Tensor, noise: float | Tensor, count: int, delta1: float, generator: torch.Generator | None
) -> Float64[Tensor, "m d"]:
    """z for each query, within (z-small)."""
    if isinstance(noise, Tensor) and noise.ndim:
        if noise.shape != (count, keys.shape[-1]):
            raise ValueError(f"noise: expected shape {(count, keys.shape[-1])}, got {tuple(noise.shape)}")
        require_finite(noise, "noise")
        z = noise.double()
        worst = float(peak(keys, z).max()) if count else 0.0
        if not at_most(worst, delta1 / 4):
            raise ValueError(
                f"noise: expected |⟨z, k⟩| ≤ (δ1/4)‖k‖² = {delta1 / 4:.4g}‖k‖² for every key, got {worst:.4g}‖k‖²"
            )
        return z
    amount = float(noise)
    if not 0.0 <= amount <= 1.0:
        raise ValueError(f"noise: expected a share of the allowed noise in [0, 1], got {noise}")
    device = None if generator is None else generator.device
    z = torch.randn(count, keys.shape[-1], generator=generator, dtype=torch.float64, device=device).to(keys.device)
    highest = peak(keys, z).unsqueeze(-1)
    # A direction that no key has disturbs nothing at any length.
    return z * torch.where(highest > 0, amount * delta1 / 4 / highest, amount)


def peak(keys: Float[Tensor, "n d"], noise: Float64[Tensor, "m d"]) -> Float64[Tensor, " m"]:
    """max over the keys of |⟨z, Kₗ⟩| / ‖Kₗ‖², block by block; zero keys bound nothing."""
    highest = torch.zeros(len(noise), dtype=torch.float64, device=keys.device)
    for _, span in tiles(heads_first(keys)):
        block = keys[span].double()
        squares = block.square().sum(-1)
        ratios = (noise @ block.mT).abs_() / torch.where(squares > 0, squares, 1.0)
        highest = torch.maximum(highest, ratios.amax(-1))
    return highest
