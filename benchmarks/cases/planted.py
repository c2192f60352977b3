"""Planted model: the time of a query does not grow with n, while a scan of all keys does."""

from __future__ import annotations

import time
from statistics import median

import torch

import levattention as la

D, K, SIZE, QUERIES, ROUNDS = 64, 16, 16, 200, 7


def prepare(n: int, seed: int = 0) -> dict:
    """Keys, queries, and both ways to answer them."""
    model = la.planted.near_orthogonal(n, D, K, SIZE / n, 1e-6, torch.Generator().manual_seed(seed), rotate=True)
    found = model.assumptions
    started = time.perf_counter()
    recovery = la.planted.recover(model.keys, delta1=found.delta1, rho=found.rho)
    prepared = time.perf_counter()
    sketched = la.planted.recover(
        model.keys,
        delta1=found.delta1,
        rho=found.rho,
        sketch=la.planted.JL(),
        generator=torch.Generator().manual_seed(seed),
    )
    done = time.perf_counter()
    made = model.random_queries(QUERIES, torch.Generator().manual_seed(seed + 1))
    limit = 2 * found.delta1 * model.keys.square().sum(-1)

    def scan(q: torch.Tensor) -> torch.Tensor:
        return (model.keys @ q >= limit).nonzero().squeeze(-1)

    vectors = made.vectors.float()
    return {
        "n": n,
        "recovery": recovery,
        "scan": scan,
        "vectors": vectors,
        "candidates": len(recovery.candidates),
        "sketched_candidates": len(sketched.candidates),
        "sketch_columns": sketched.columns,
        "prepare_seconds": prepared - started,
        "prepare_sketched_seconds": done - prepared,
        "recovered": all(a.equal(t) for a, t in zip(recovery.relevant_keys(vectors), made.relevant, strict=True)),
        "scan_recovered": all(scan(q).equal(t) for q, t in zip(vectors[:10], made.relevant[:10], strict=True)),
    }


def seconds(answer, vectors) -> float:
    """The median time of one call."""
    taken = []
    for q in vectors:
        started = time.perf_counter()
        answer(q)
        taken.append(time.perf_counter() - started)
    return median(taken)


def run() -> dict:
    """Seconds a query at n = 10⁴ and 10⁶ with equal |U′|, by recovery and by brute force."""
    cases = [prepare(n) for n in (10_000, 1_000_000)]
    if not all(case["recovered"] and case["scan_recovered"] for case in cases):
        raise RuntimeError("planted: a relevant key was missed, or a false one found; no time is worth reporting")
    taken: dict[tuple[str, int], list[float]] = {}
    # The two sizes take turns, so that a busy moment of the machine falls on both.
    for _ in range(ROUNDS):
        for case in cases:
            n, recovery, vectors = case["n"], case["recovery"], case["vectors"]
            taken.setdefault(("query", n), []).append(seconds(recovery.relevant_keys, vectors))
            taken.setdefault(("batch", n), []).append(seconds(lambda _, r=recovery, v=vectors: r.relevant_keys(v), [0]))
            taken.setdefault(("scan", n), []).append(seconds(case["scan"], vectors[:10]))
    rows = []
    for case in cases:
        kept = ("n", "candidates", "sketched_candidates", "sketch_columns", "prepare_seconds")
        row = {name: case[name] for name in (*kept, "prepare_sketched_seconds", "recovered")}
        row |= {f"{name}_seconds": median(taken[name, case["n"]]) for name in ("query", "scan")}
        rows.append(row | {"batch_seconds": median(taken["batch", case["n"]]) / QUERIES})
    small, large = rows
    return {
        "case": "planted",
        "d": D,
        "standout": SIZE,
        "queries": QUERIES,
        "rows": rows,
        "query_time_ratio": large["query_seconds"] / small["query_seconds"],
        "batch_time_ratio": large["batch_seconds"] / small["batch_seconds"],
        "scan_time_ratio": large["scan_seconds"] / small["scan_seconds"],
        "speedup_over_scan": large["scan_seconds"] / large["query_seconds"],
    }


if __name__ == "__main__":
    import json

    print(json.dumps(run(), indent=1))
