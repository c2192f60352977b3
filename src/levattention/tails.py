"""Tail bounds behind what sketches promise."""

from __future__ import annotations

import math

import torch

# Where the probability that a row of H·D·Q is long is traded against the rest.
BETAS = [10.0**-power for power in range(1, 19)]


def gaussian_failure(m: int, d: int, delta: float) -> float:
    """Singular values of a Gaussian leave 1 ± (√d + t)/√m with probability at most 2·exp(−t²/2)."""
    t = math.sqrt(m) * (math.sqrt(1 + delta) - 1) - math.sqrt(d)
    return min(1.0, 2 * math.exp(-t * t / 2)) if t > 0 else 1.0


def second_moment_failure(m: int, d: int, delta: float) -> float:
    """E‖QᵀΠᵀΠQ − I‖²_F ≤ d(d+1)/m for orthonormal Q, whatever s is; then Markov's inequality."""
    return min(1.0, d * (d + 1) / (m * delta**2))


def chi_square_tail(degrees: int, delta: float) -> float:
    """P(χ²/degrees > 1 + δ) ≤ exp(−degrees·(δ − ln(1+δ))/2)."""
    return math.exp(-degrees * (delta - math.log1p(delta)) / 2)


def chernoff_exponent(delta: float) -> float:
    """(1+δ)·ln(1+δ) − δ, for δ > −1; 1 at −1 and below, where the lower tail is empty."""
    return (1 + delta) * math.log1p(delta) - delta if delta > -1 else 1.0


def chi_square_quantile(degrees: int, probability: float) -> float:
    """x with P(χ² ≤ x) = probability, by bisection."""
    low, high = 0.0, float(degrees)
    half = torch.tensor(degrees / 2, dtype=torch.float64)
    for _ in range(200):
        middle = (low + high) / 2
        below = float(torch.special.gammainc(half, torch.tensor(middle / 2, dtype=torch.float64))) < probability
        low, high = (middle, high) if below else (low, middle)
    return low
