"""Lewis weights in leverage passes, and |U| by true sensitivities, one-shot, Lewis and lifted bounds."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import levattention as la
from cases._timing import medians
from levattention.scorers import Lewis, Lift, PowerBound, Sensitivity

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from strategies import heavy_tailed

PASSES = 15


def sizes(keys: torch.Tensor, p: float, eps: float) -> dict[str, int]:
    """|U| at ε by each bound; "one-shot" is the dual bound at the Lewis weights, with no iteration."""
    from levattention.scorers.lewis import fit_lewis
    from levattention.scorers.lp import Bounds, Dual, tighten

    n = len(keys)
    once = Bounds(torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64))
    at_once = Dual.of(keys, fit_lewis(keys, p, 1e-3, fallback=False), p)
    tighten(at_once, torch.arange(n), once, lambda lower, upper: torch.ones_like(lower, dtype=torch.bool))
    found = {
        "true": int(la.universal_set(keys, eps=eps, scorer=Sensitivity(la.Power(p))).size),
        "one-shot": int((once.upper >= eps).sum()),
        "Lewis": int((Lewis(p)(keys) >= eps).sum()),
    }
    if la.Power(p).even:
        found |= {"lifted": int((Lift(p)(keys) >= eps).sum()), "default": int((PowerBound(p)(keys) >= eps).sum())}
    return found


def run() -> dict:
    """Seconds for n = 100,000, d = 64, p = 4 and their ratio to one pass of leverage scores; sizes at n = 3,000."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(100_000, 64, generator=generator)
    seconds = medians(
        {
            # As long as the other, so that a slow spell of the machine hits both.
            "leverage": lambda: [la.leverage_scores(keys) for _ in range(PASSES)],
            "Lewis p=4": lambda: la.lewis_weights(keys, 4),
        },
        repeats=7,
    )
    seconds["leverage"] /= PASSES
    figures: dict = {f"{name} s": value for name, value in seconds.items()}
    figures["Lewis p=4 in leverage passes"] = seconds["Lewis p=4"] / seconds["leverage"]
    small = {
        "gauss": torch.randn(3000, 12, generator=generator, dtype=torch.float64),
        "t1.5": heavy_tailed(3000, 12),
    }
    for name, matrix in small.items():
        for p in (1, 1.5, 3, 4, 6):
            figures |= {f"|U| {name} p={p} {by}": size for by, size in sizes(matrix, p, 0.1).items()}
    return figures
