"""Medians of interleaved repeats, so that a busy spell hits every contender alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def medians(contenders: dict[str, Callable[[], object]], repeats: int = 5) -> dict[str, float]:
    """Median seconds of each contender, after one warm-up each."""
    for run in contenders.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeats):
        for name, run in contenders.items():
            started = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}
