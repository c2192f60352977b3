"""Heavy queries against brute force and FAISS: time of a batch of 64, build time and bytes, as n grows to 10⁷.

Seconds are of the processor: on a shared machine a contender that runs long would otherwise be charged for its
neighbours, and one that is done in a fraction of a time slice would not.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import faiss
import numpy as np
import torch

import levattention as la
from levattention.scorers import SketchedLeverage
from levattention.sketches import OSNAP, SRHT
from levattention.sources import open_keys

D, EPS, BATCH, LONG = 64, 0.05, 64, 100
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
ROUNDS = 15


def write_keys(path: Path, n: int, d: int) -> None:
    """Gaussian keys, `LONG` of them a thousand times as long: those are U, whatever n is."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, d))
    generator = np.random.default_rng(0)
    for start in range(0, n, 100_000):
        count = min(100_000, n - start)
        array[start : start + count] = generator.standard_normal((count, d), dtype=np.float32)
    array[:: n // LONG] *= 1000
    array.flush()


def by_product(keys: torch.Tensor, queries: torch.Tensor, p: int, eps: float = EPS) -> torch.Tensor:
    """(query, key) of every weight ≥ ε from the whole rows of attention, in fp32 as a user would take them."""
    values = queries @ keys.mT
    values = values.square_() if p == 2 else values.pow_(p)
    return (values >= eps * values.sum(-1, keepdim=True)).nonzero()


def timed(run, repeats: int) -> float:
    """Median seconds of the processor, after one call to warm up."""
    run()
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        run()
        taken.append(time.process_time() - started)
    return median(taken)


def require_same(hits: la.Hits, keys: torch.Tensor, queries: torch.Tensor, p: int, label: str) -> None:
    """Nothing, if the hits are those of brute force but for weights within 0.1 % of ε, where fp32 does not tell."""
    rows = torch.arange(len(hits.index)).unsqueeze(-1).expand(hits.index.shape)
    found = set(zip(rows[hits.valid].tolist(), hits.index[hits.valid].tolist(), strict=True))
    certain, possible = (set(map(tuple, by_product(keys, queries, p, EPS * f).tolist())) for f in (1.001, 0.999))
    if not certain <= found <= possible:
        raise RuntimeError(f"heavy: {label} differs from brute force; no time is worth reporting")


def peers(keys: torch.Tensor, queries: torch.Tensor, hits: la.Hits, label: str) -> dict:
    """Brute force by a matrix product, and FAISS's flat index asked for as many keys as there are hits."""
    repeats = 7 if len(keys) <= 100_000 else 3 if len(keys) <= 1_000_000 else 2
    figures = {f"{label} brute force s": timed(lambda: by_product(keys, queries, 2), repeats)}
    require_same(hits, keys, queries, 2, label)
    count = int(hits.valid.sum(-1).max())
    started = time.process_time()
    flat = faiss.IndexFlatIP(keys.shape[-1])
    flat.add(keys.numpy())
    figures[f"{label} faiss build s"] = time.process_time() - started
    figures[f"{label} faiss s"] = timed(lambda: flat.search(queries.numpy(), count), repeats)
    _, first = flat.search(queries.numpy(), count)
    wanted = [set(index[valid].tolist()) for index, valid in zip(hits.index, hits.valid, strict=True)]
    total = max(1, sum(map(len, wanted)))
    figures[f"{label} faiss recall"] = sum(len(w & set(f)) for w, f in zip(wanted, first.tolist(), strict=True)) / total
    figures[f"{label} faiss bytes"] = flat.ntotal * keys.shape[-1] * 4
    return figures


def growing(folder: Path) -> dict:
    """f = x², d = 64: everything as a function of n."""
    figures: dict = {}
    indices = {}
    queries = torch.randn(BATCH, D, generator=torch.Generator().manual_seed(1))
    for n in SIZES:
        path = folder / "keys.npy"
        write_keys(path, n, D)
        keys = open_keys(path)
        float(keys[::512].sum())  # a first look at the file is the disk's time, not ours
        started = time.process_time()
        index = la.HeavyIndex(keys, EPS)
        label = f"n={n}"
        figures[f"{label} build s"] = time.process_time() - started
        stats = index.stats()
        figures |= {f"{label} bytes": stats["bytes"], f"{label} |U|": stats["size"]}
        indices[n] = index
        hits = index(queries)
        figures[f"{label} hits"] = int(hits.valid.sum())
        figures |= peers(torch.from_numpy(np.load(path)), queries, hits, label)
        path.unlink()
    # The sizes take turns, so that a busy moment of the machine falls on all of them.
    taken: dict[int, list[float]] = {n: [] for n in SIZES}
    for _ in range(ROUNDS):
        for n, index in indices.items():
            taken[n].append(timed(lambda index=index: index(queries), 20))
    figures |= {f"n={n} query s": median(seconds) for n, seconds in taken.items()}
    figures["query, n=10^7 over n=10^4"] = figures["n=10000000 query s"] / figures["n=10000 query s"]
    figures["build, n=10^7 over n=10^6"] = figures["n=10000000 build s"] / figures["n=1000000 build s"]
    for n in SIZES:
        ours = figures[f"n={n} query s"]
        figures[f"n={n} speed-up over brute force"] = figures[f"n={n} brute force s"] / ours
        figures[f"n={n} speed-up over faiss"] = figures[f"n={n} faiss s"] / ours
    return figures


def fourth_power() -> dict:
    """f = x⁴, d = 16: the exact normaliser from a lift of 136 columns."""
    figures: dict = {}
    generator = torch.Generator().manual_seed(0)
    for n in (10_000, 100_000, 1_000_000):
        keys = torch.randn(n, 16, generator=generator)
        keys[:: n // LONG] *= 30
        queries = torch.randn(BATCH, 16, generator=generator)
        started = time.process_time()
        index = la.HeavyIndex(keys, EPS, la.Power(4))
        label = f"p=4 n={n}"
        figures[f"{label} build s"] = time.process_time() - started
        hits = index(queries)
        require_same(hits, keys, queries, 4, label)
        figures[f"{label} |U|"], figures[f"{label} hits"] = index.stats()["size"], int(hits.valid.sum())
        figures[f"{label} bytes"] = index.stats()["bytes"]
        figures[f"{label} query s"] = timed(lambda index=index, q=queries: index(q), 100)
        figures[f"{label} brute force s"] = timed(lambda k=keys, q=queries: by_product(k, q, 4), 3)
        figures[f"{label} speed-up over brute force"] = figures[f"{label} brute force s"] / figures[f"{label} query s"]
        exact = (queries.double() @ keys.double().mT).pow(4).sum(-1)
        off = index.normaliser(queries.double()) / exact - 1
        figures[f"{label} normaliser's relative error"] = off.abs().max().item()
    return figures


def sketching() -> dict:
    """Universal sets by exact and by sketched leverage: the same set, and what each costs."""
    figures: dict = {}
    generator = torch.Generator().manual_seed(0)
    for n, d, delta in ((500_000, 64, 3.0), (100_000, 512, 1.0)):
        keys = torch.randn(n, d, generator=generator)
        keys[:: n // LONG] *= 30
        contenders = {
            "exact": la.scorers.Leverage(),
            "OSNAP": SketchedLeverage(OSNAP(8 * d, 16), 5.0),
            "SRHT": SketchedLeverage(SRHT(16 * d), delta),
            "SRHT, 64 columns": SketchedLeverage(SRHT(16 * d), delta, columns=64),
        }
        if d > 64:
            del contenders["OSNAP"]
        expected = la.universal_set(keys, eps=EPS).index
        for name, scorer in contenders.items():
            label = f"leverage {n}x{d} {name}"
            found = la.universal_set(keys, eps=EPS, scorer=scorer)
            if not torch.equal(found.index, expected):
                raise RuntimeError(f"heavy: {label} gives another set")
            figures[f"{label} set s"] = timed(lambda s=scorer, k=keys: la.universal_set(k, eps=EPS, scorer=s), 1)
            if isinstance(scorer, SketchedLeverage):
                figures[f"{label} superset alone s"] = timed(lambda s=scorer, k=keys: s.candidates(k, EPS), 1)
                figures[f"{label} candidates"] = int(scorer.candidates(keys, EPS).sum())
        figures[f"leverage {n}x{d} |U|"] = int((expected > 0).sum()) + 1
    return figures


def run() -> dict:
    """Seconds for a batch of 64 queries, ratios to the peers in the same run, build seconds and bytes."""
    faiss.omp_set_num_threads(torch.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        figures = {"d": D, "eps": EPS, "batch": BATCH} | growing(Path(folder))
    return figures | fourth_power() | sketching()


if __name__ == "__main__":
    for name, value in run().items():
        print(f"{name}: {value}", file=sys.stderr)
