"""One pass over a file of 20,000,000 × 64 fp32 keys (5 GB): anonymous memory, and rows a second against a bare Gram.

Two files: in one the length of a key alone settles nearly every row, in the other (columns of falling scale, κ about
250) it settles none and every row is scored. The Gram pass reads the same file in turns with the stream, in the same
process. Also how many rows the paper's keep-forever rule stores of a growing stream.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from levattention import KeyStream
from levattention.online import keep_forever

N, D, EPS = 20_000_000, 64, 0.01

CHILD = """
import json, statistics, sys, threading, time
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
import torch
import levattention as la
from levattention.gram import Gram
from levattention.shards import BLOCK
from levattention.sources import open_keys
keys, eps = open_keys(sys.argv[1]), float(sys.argv[2])
seen, peaks = 0, [0, 0]
def watch():
    while True:
        late = seen > 0.01 * len(keys)
        peaks[late] = max(peaks[late], anonymous())
        time.sleep(0.005)
threading.Thread(target=watch, daemon=True).start()
def stream():
    global seen
    seen, one = 0, la.KeyStream(keys.shape[-1], eps=eps)
    for block in keys.split(BLOCK // keys.shape[-1]):
        one.update(block)
        seen += len(block)
    return one.finish(), one.stats()
times = {"stream": [], "gram": [], "stream cpu": [], "gram cpu": []}
def timed(name, run):
    wall, cpu = time.perf_counter(), time.process_time()
    result = run()
    times[name].append(time.perf_counter() - wall)
    times[name + " cpu"].append(time.process_time() - cpu)
    return result
u, stats = timed("stream", stream)
early, late = peaks
for _ in range(2):
    timed("gram", lambda: Gram.of(keys))
    timed("stream", stream)
timed("gram", lambda: Gram.of(keys))
medians = {name: statistics.median(values) for name, values in times.items()}
print(json.dumps({
    "stream seconds": medians["stream"],
    "bare Gram seconds": medians["gram"],
    "rows a second": len(keys) / medians["stream"],
    "throughput against the Gram pass": medians["gram"] / medians["stream"],
    "the same in CPU time": medians["gram cpu"] / medians["stream cpu"],
    "anonymous MB in the first 1 %": early / 1e6,
    "anonymous MB after": late / 1e6,
    "memory growth": max(early, late) / early - 1,
    "share spared by length": stats["spared"],
    "most rows kept": stats["peak"],
    "size of U": int(u.size),
    "route": u.route,
}))
"""


def write_keys(path: Path, faintest: float) -> None:
    """Gaussian keys, their columns falling to `faintest`, with a hundred long rows, written block by block."""
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(N, D))
    generator, scale = np.random.default_rng(0), np.linspace(1, faintest, D, dtype=np.float32)
    for start in range(0, N, 100_000):
        array[start : start + 100_000] = generator.standard_normal((min(100_000, N - start), D), dtype=np.float32)
        array[start : start + 100_000] *= scale
    array[:: N // 100] *= 100
    array.flush()


def measure(folder: Path, faintest: float) -> dict:
    """All figures of one file, which is gone afterwards."""
    path = folder / "keys.npy"
    write_keys(path, faintest)
    command = [sys.executable, "-c", CHILD, str(path), str(EPS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    path.unlink()
    return json.loads(done.stdout)


def growing() -> dict:
    """Rows kept of a stream whose rows grow from 1e-6 to 1e6."""
    scales = torch.logspace(-6, 6, 20_000, dtype=torch.float64).unsqueeze(-1)
    keys = torch.randn(20_000, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * scales
    stream = KeyStream(16, eps=EPS)
    for block in keys.split(500):
        stream.update(block)
        stream.settle()
    return {
        "growing stream 20,000 × 16, rows kept at most": stream.stats()["peak"],
        "rank/ε": 16 / EPS,
        "rows the keep-forever rule stores": len(keep_forever(keys, eps=EPS).stored),
    }


def run() -> dict:
    figures: dict = {"n": N, "d": D, "eps": EPS, "file MB": N * D * 4 / 1e6}
    with tempfile.TemporaryDirectory() as folder:
        for name, faintest in {"screen spares rows": 1.0, "every row scored": 4e-3}.items():
            figures |= {f"{name}: {label}": value for label, value in measure(Path(folder), faintest).items()}
    return figures | growing()
