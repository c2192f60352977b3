"""A sampled normaliser: heavy rows as they are, and a systematic sample of the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from levattention._shapes import Float64, Int64
from levattention.csr import csr_pick, is_csr
from levattention.losses import Huber, Loss, Power, Tukey
from levattention.normaliser.rows import Guarantee, WeightedRows, elements, require_rates, stacked
from levattention.scorers import Leverage, Lewis, Robust

# Lewis weights bound the sensitivities wherever their iteration stops; a sample needs no sharper bound than this.
LEWIS_TOL = 0.05


@dataclass(frozen=True)
class Sampled:
    """Z(q) ≈ Σⱼ f(⟨kⱼ, q⟩)/πⱼ over few keys, for |x|^p with any p ≥ 1, Huber and Tukey.

    With σ̂ⱼ ≥ σⱼ, from Lewis weights, leverage or the weights of the robust losses, key j is taken with
    πⱼ = min(1, c·σ̂ⱼ), so those with π = 1 are exact. The light ones are sorted by π and laid end to end on a line of
    length Σπ; in every unit of it one point is drawn. That is systematic sampling, but for an offset of its own in each
    unit: the draws are independent, each is at most Z/c, and Bernstein's inequality gives
    c = 2(1 + δ/3)·ln(2/failure)/δ² for a given query. Over all queries at once it is measured, not proved.

    Attributes:
        delta: δ in (0, 1).
        failure: the probability, for each query, that Z is farther off.
        seed: of the sample.
    """

    delta: float = 0.1
    failure: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        require_rates(delta=self.delta, failure=self.failure)

    @property
    def multiplier(self) -> float:
        """c."""
        return 2 * (1 + self.delta / 3) * math.log(2 / self.failure) / self.delta**2

    def __call__(self, keys: Tensor, loss: Loss) -> WeightedRows:
        """The fitted normaliser.

        Raises:
            ValueError: bad keys, or a loss whose sensitivities have no bound for all queries.
        """
        n, batch = keys.shape[-2], keys.shape[:-2]
        bounds = sensitivity_bounds(keys, loss).reshape(-1, n)
        generator = torch.Generator().manual_seed(self.seed)
        rows, weights, sure = [], [], 0
        for head, bound in zip(elements(keys), bounds, strict=True):
            chance = (self.multiplier * bound).clamp(max=1.0)
            index, weight = draw(chance, generator)
            # At least one row, so that a head of zeros has a sum too.
            if len(index) == 0:
                index, weight = index.new_zeros(1), weight.new_zeros(1)
            rows.append((csr_pick(head, index) if is_csr(head) else head[index]).double())
            weights.append(weight)
            sure = max(sure, int((chance >= 1).sum()))
        taken = max(map(len, rows))
        how = f"{taken:,} of {n:,} keys, {sure:,} of them heavy and exact"
        all_in = bool((bounds * self.multiplier >= 1).logical_or(bounds == 0).all())
        guarantee = (
            Guarantee(0.0, 0.0, True, True, f"all {taken:,} keys are held")
            if all_in
            else Guarantee(self.delta, self.failure, False, True, how)
        )
        return WeightedRows(loss, stacked(rows, batch), guarantee, stacked(weights, batch))


def sensitivity_bounds(keys: Tensor, loss: Loss) -> Float64[Tensor, "*batch n"]:
    """σ̂ ≥ σ for every key."""
    if loss == Power(2):
        return Leverage()(keys)
    if isinstance(loss, Power):
        return Lewis(loss.p, LEWIS_TOL)(keys)
    if isinstance(loss, Huber | Tukey):
        return Robust(loss)(keys)
    raise ValueError(f"loss: a sample is drawn for Power, Huber and Tukey, got {loss!r}")


def draw(
    chance: Float64[Tensor, " n"], generator: torch.Generator
) -> tuple[Int64[Tensor, " m"], Float64[Tensor, " m"]]:
    """(positions, weights) whose weighted sum of anything is unbiased: all with chance 1, and Σπ of the others."""
    sure = (chance >= 1).nonzero().squeeze(-1)
    light = ((chance > 0) & (chance < 1)).nonzero().squeeze(-1)
    light = light[chance[light].argsort(descending=True, stable=True)]
    ends = chance[light].cumsum(0)
    length = float(ends[-1]) if len(light) else 0.0
    units = torch.arange(math.ceil(length), dtype=torch.float64)
    points = (units + torch.rand(len(units), dtype=torch.float64, generator=generator)).to(chance.device)
    # The last unit may reach beyond the line: a point there draws nothing.
    slots = torch.searchsorted(ends, points[points < length], right=True).clamp(max=max(0, len(light) - 1))
    slots, times = slots.unique_consecutive(return_counts=True)
    drawn = light[slots]
    return torch.cat([sure, drawn]), torch.cat([torch.ones_like(chance[sure]), times / chance[drawn]])
