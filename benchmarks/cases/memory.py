"""Peak anonymous memory of finding U in a memory-mapped file of 10,000,000 × 64 fp32 keys (2.5 GB)."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

CHILD = """
import json, sys, threading, time
peak = 0
def watch():
    global peak
    while True:
        with open("/proc/self/status") as status:
            for line in status:
                if line.startswith("RssAnon"):
                    peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.01)
threading.Thread(target=watch, daemon=True).start()
import levattention as la
from levattention.sources import open_keys
keys = open_keys(sys.argv[1])
time.sleep(0.1)
before = peak
started = time.perf_counter()
u = la.universal_set(keys, eps=float(sys.argv[2]))
print(json.dumps({"seconds": time.perf_counter() - started, "anonymous MB before": before / 1e6,
                  "peak anonymous MB": peak / 1e6, "size of U": int(u.size), "route": u.route}))
"""


def write_keys(path: Path, n: int, d: int) -> None:
    """Gaussian keys with a few long rows, written block by block."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(n, d))
    generator = np.random.default_rng(0)
    for start in range(0, n, 100_000):
        array[start : start + 100_000] = generator.standard_normal((min(100_000, n - start), d), dtype=np.float32)
    array[:: n // 100] *= 1000
    array.flush()


def measure(path: Path, eps: float = 0.01) -> dict:
    """Time, set size and peak anonymous memory of one search in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(path), str(eps)], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def run() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "keys.npy"
        write_keys(path, 10_000_000, 64)
        return {"n": 10_000_000, "d": 64, "file MB": path.stat().st_size / 1e6} | measure(path)
