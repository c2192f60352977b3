"""Leverage scores against QR: one long matrix, and a batch of heads; time and error."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import levattention as la
from cases._timing import medians

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from oracles import leverage_by_svd
from strategies import conditioned


def by_qr(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.linalg.qr(keys.to(dtype)).Q.double().square().sum(-1)


def run() -> dict:
    """Seconds, ratios and the largest relative error of each route."""
    figures: dict = {}
    generator = torch.Generator().manual_seed(0)
    for label, shape in {"1000000x64": (1_000_000, 64), "96x1024x64": (96, 1024, 64)}.items():
        keys = torch.randn(shape, generator=generator)
        seconds = medians(
            {
                "ours": lambda keys=keys: la.leverage_scores(keys),
                "qr fp64": lambda keys=keys: by_qr(keys, torch.float64),
                "qr fp32": lambda keys=keys: by_qr(keys, torch.float32),
            },
            repeats=5,
        )
        figures |= {f"{label} {name} s": value for name, value in seconds.items()}
        figures[f"{label} speed-up over fp64 QR"] = seconds["qr fp64"] / seconds["ours"]
        exact = by_qr(keys, torch.float64)
        for name, scores in {"ours": la.leverage_scores(keys), "qr fp32": by_qr(keys, torch.float32)}.items():
            figures[f"{label} {name} relative error"] = ((scores - exact).abs() / exact).max().item()
    for kappa in (1e2, 1e4, 1e6):
        keys = conditioned(4000, 64, kappa)
        exact = leverage_by_svd(keys, 64 * 2.3e-16)
        figures[f"kappa {kappa:.0e} ours relative error"] = (
            ((la.leverage_scores(keys) - exact).abs() / exact).max().item()
        )
    return figures
