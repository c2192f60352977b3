"""The planted model over a grid of settings: what is assumed, what is measured, what is recovered, and how fast."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor

from levattention.planted.assumptions import Assumptions
from levattention.planted.model import Planted, generate, near_orthogonal, require_setting
from levattention.planted.query import queries
from levattention.planted.recovery import Recovery, recover

Row = dict[str, Any]

# Where δ1 is measured against k: dimensions of V, sizes of S, and how many seeds.
DELTA_DIMENSIONS = (16, 32, 64, 128, 256, 512, 1024, 2048)
DELTA_SIZES = (16, 256)
DELTA_SEEDS = 5


@dataclass(frozen=True)
class Sweep:
    """What to sweep over.

    Attributes:
        n: numbers of keys.
        k: dimensions of V.
        eps1: squared lengths on the wrong side.
        d: dimension of the keys.
        standout: |S|, where eps0 is left out.
        eps0: share of stand-out keys, instead.
        count: queries for each setting.
        scaling: numbers of keys at which the time of a query is taken.
        seed: of all randomness.

    Raises:
        ValueError: a setting that is impossible, before any work is done.

    Example:
        >>> Sweep(n=(100,), k=(8,), eps1=(0.1,), d=16)
        Traceback (most recent call last):
        ValueError: k: expected k ≤ d/4 = 4, got 8: keys outside S need room outside V
    """

    n: tuple[int, ...] = (2_000, 8_000, 32_000)
    k: tuple[int, ...] = (16, 64, 192)
    eps1: tuple[float, ...] = (1e-4, 1e-3, 3e-3, 1e-2)
    d: int = 768
    standout: int = 8
    eps0: float | None = None
    count: int = 100
    scaling: tuple[int, ...] = (10_000, 100_000, 1_000_000)
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("n", "k", "eps1"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected at least one value")
        for name in ("count", "standout"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        for n, k, eps1 in self.settings():
            require_setting(n, self.d, k, self.share(n), eps1)
        for n in self.scaling:
            if n < SCALING["size"]:
                raise ValueError(f"scaling: expected n ≥ {SCALING['size']}, the stand-out keys alone, got {n}")

    def share(self, n: int) -> float:
        """ε0 at n keys."""
        if self.eps0 is None and self.standout > n:
            raise ValueError(f"standout: expected at most n = {n} keys, got {self.standout}")
        return self.standout / n if self.eps0 is None else self.eps0

    def settings(self) -> list[tuple[int, int, float]]:
        """Every (n, k, ε1), the slowest to change first."""
        return [(n, k, eps1) for n in self.n for k in self.k for eps1 in self.eps1]

    @property
    def steps(self) -> int:
        """How many settings there are in all."""
        return len(self.settings()) + len(DELTA_DIMENSIONS) * len(DELTA_SIZES) + len(self.scaling)


# The keys at which the time of a query is taken: only n changes.
SCALING = {"d": 64, "k": 16, "size": 16}


def run(sweep: Sweep, tick: Callable[[str], None]) -> dict[str, Any]:
    """All figures of the sweep, as plain numbers; `tick` is told before each setting what comes."""
    found: dict[str, Any] = {"sweep": asdict(sweep), "settings": [], "delta1": [], "scaling": []}
    for n, k, eps1 in sweep.settings():
        tick(f"n = {n:,}, k = {k}, ε1 = {eps1:g}")
        found["settings"].append(measure_setting(sweep, n, k, eps1))
    for size in DELTA_SIZES:
        for k in DELTA_DIMENSIONS:
            tick(f"δ1 at k = {k}, |S| = {size}")
            found["delta1"].append(measure_delta1(k, size, sweep.seed))
    for n in sweep.scaling:
        tick(f"time at n = {n:,}")
        found["scaling"].append(measure_time(n, sweep.count, sweep.seed))
    return found


def expected_delta1(size: int, k: int) -> float:
    """√(2 ln(|S|²/2)/k), the largest cosine among |S| random directions of k dimensions; 0 for one key."""
    return math.sqrt(2 * max(0.0, math.log(size * size / 2)) / k) if size > 1 else 0.0


def expected_delta2(n: int, d: int, size: int, k: int, eps1: float) -> float:
    """√(2ε1(1/k + 1/(d−k)) ln(n|S|))."""
    return math.sqrt(2 * eps1 * (1 / k + 1 / (d - k)) * math.log(n * size))


def largest_eps1(n: int, d: int, size: int, k: int) -> float:
    """ε1 at which δ2² is expected to reach 1/d, so that ρ falls to d/n, what an average key has."""
    return 1 / (2 * d * (1 / k + 1 / (d - k)) * math.log(n * size))


def measure_setting(sweep: Sweep, n: int, k: int, eps1: float) -> Row:
    """One setting of the block Gaussian: assumptions, U, U′, and recovery with measured δ and with the paper's."""
    model = generate(n, sweep.d, k, sweep.share(n), eps1, torch.Generator().manual_seed(sweep.seed), rotate=True)
    measured, size = model.assumptions, len(model.standout)
    started = time.perf_counter()
    # U and U′ depend on ρ alone, so they can be looked at where δ1 is too large for any query.
    recovery = recover(model.keys, delta1=min(0.25, max(measured.delta1, 1e-9)), rho=measured.rho)
    seconds = time.perf_counter() - started
    row: Row = {"n": n, "d": sweep.d, "k": k, "eps1": eps1, "size": size}
    row |= {"delta1": measured.delta1, "delta1_paper": 4 / k, "delta1_expected": expected_delta1(size, k)}
    row |= {"delta2": measured.delta2, "delta2_paper": 4 * eps1 / k}
    row |= {"delta2_expected": expected_delta2(n, sweep.d, size, k, eps1)}
    row |= {"largest_eps1": largest_eps1(n, sweep.d, size, k)}
    row |= {"rho": measured.rho, "holds": measured.holds, "problems": list(measured.problems)}
    row |= {"max_relevant": measured.max_relevant, "seconds": seconds}
    row |= {"universal": int(recovery.universal.size), "candidates": len(recovery.candidates)}
    row |= {"standout_kept": share_kept(model, recovery), "recovered": None, "false_keys": None}
    if measured.holds and measured.delta1 > 0:
        generator = torch.Generator().manual_seed(sweep.seed + 1)
        made = model.random_queries(sweep.count, generator)
        row["recovered"], row["false_keys"] = score(recovery.relevant_keys(made.vectors), made.relevant)
    return row | trusting_the_paper(sweep, model, recovery, k, eps1)


def trusting_the_paper(sweep: Sweep, model: Planted, right: Recovery, k: int, eps1: float) -> Row:
    """What δ1 = 4/k and δ2 = 4ε1/k give, one relevant key a query; nothing where 4δ1 > 1.

    Two things go wrong, so each is looked at: U′ at the ρ that follows, and the threshold 2δ1 on a U′ that holds S.
    """
    claimed = Assumptions(len(model.keys), len(model.standout), 4 / k, 4 * eps1 / k)
    if claimed.max_relevant < 1:
        return dict.fromkeys(("paper_standout_kept", "paper_recovered", "paper_threshold_recovered"))
    generator = torch.Generator().manual_seed(sweep.seed + 2)
    picked = torch.randint(len(model.standout), (sweep.count, 1), generator=generator)
    made = queries(model.keys, model.standout, list(model.standout[picked]), delta1=claimed.delta1, generator=generator)
    recovery = recover(model.keys, delta1=claimed.delta1, rho=claimed.rho)
    recovered, _ = score(recovery.relevant_keys(made.vectors), made.relevant)
    with_all = replace(right, delta1=claimed.delta1).relevant_keys(made.vectors)
    return {
        "paper_standout_kept": share_kept(model, recovery),
        "paper_recovered": recovered,
        "paper_threshold_recovered": score(with_all, made.relevant)[0],
    }


def share_kept(model: Planted, recovery: Recovery) -> float:
    """The share of S that is in U′."""
    return torch.isin(model.standout, recovery.candidates).double().mean().item()


def score(answers: list[Tensor], truth: list[Tensor]) -> tuple[float, int]:
    """The share of queries whose relevant keys came out exactly, and how many false keys came out in all."""
    exact = sum(answer.equal(relevant) for answer, relevant in zip(answers, truth, strict=True))
    false = sum(int((~torch.isin(a, t)).sum()) for a, t in zip(answers, truth, strict=True))
    return exact / len(truth), false


def measure_delta1(k: int, size: int, seed: int) -> Row:
    """δ1 of the block Gaussian's stand-out rows alone, over a few seeds."""
    values = [
        generate(size, 4 * k, k, 1.0, 1e-4, torch.Generator().manual_seed(seed + s)).assumptions.delta1
        for s in range(DELTA_SEEDS)
    ]
    return {"k": k, "size": size, "measured": values, "paper": 4 / k, "expected": expected_delta1(size, k)}


def measure_time(n: int, count: int, seed: int) -> Row:
    """Seconds to prepare n near-orthogonal keys, and to answer a query from U′ or by a scan of all keys."""
    d, k, size = SCALING["d"], SCALING["k"], SCALING["size"]
    model = near_orthogonal(n, d, k, size / n, 1e-6, torch.Generator().manual_seed(seed), rotate=True)
    started = time.perf_counter()
    found = model.assumptions
    checked = time.perf_counter()
    recovery = recover(model.keys, delta1=found.delta1, rho=found.rho)
    prepared = time.perf_counter()
    made = model.random_queries(count, torch.Generator().manual_seed(seed + 1))
    vectors = made.vectors.to(model.keys.dtype)
    limit = 2 * found.delta1 * model.keys.square().sum(-1)

    def scan(q: Tensor) -> Tensor:
        return (model.keys @ q >= limit).nonzero().squeeze(-1)

    recovered, false = score([recovery.relevant_keys(q) for q in vectors], made.relevant)
    scanned, _ = score([scan(q) for q in vectors[:20]], made.relevant[:20])
    return {
        "n": n,
        "d": d,
        "size": size,
        "max_relevant": found.max_relevant,
        "universal": int(recovery.universal.size),
        "candidates": len(recovery.candidates),
        "check_seconds": checked - started,
        "recover_seconds": prepared - checked,
        "query_seconds": seconds_each(recovery.relevant_keys, vectors),
        "batch_seconds": seconds_each(lambda _: recovery.relevant_keys(vectors), vectors[:20]) / count,
        "scan_seconds": seconds_each(scan, vectors[:20]),
        "recovered": recovered,
        "false_keys": false,
        "scan_recovered": scanned,
    }


def seconds_each(answer: Callable[[Tensor], Any], vectors: Tensor) -> float:
    """The median time of one call over the vectors, after one call that does not count."""
    answer(vectors[0])
    taken = []
    for q in vectors:
        started = time.perf_counter()
        answer(q)
        taken.append(time.perf_counter() - started)
    return median(taken)
