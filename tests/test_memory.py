"""Keys larger than the working memory: blocks are read, the file is never copied."""

import json
import subprocess
import sys

import numpy as np

CHILD = """
import json, sys, threading, time
def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))
import torch
import levattention as la
from levattention.sources import open_keys
la.universal_set(torch.randn(20000, 64), eps=0.01)
peak = before = anonymous()
def watch():
    global peak
    while True:
        peak = max(peak, anonymous())
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
u = la.universal_set(open_keys(sys.argv[1]), eps=0.01)
print(json.dumps({"growth": peak - before, "size": int(u.size)}))
"""


def test_memory_does_not_hold_the_keys(tmp_path, generator):
    n, d = 1_000_000, 64
    array = np.lib.format.open_memmap(tmp_path / "keys.npy", mode="w+", dtype=np.float32, shape=(n, d))
    array[:] = np.random.default_rng(0).standard_normal((n, d), dtype=np.float32)
    array[123_456] *= 1e4
    array.flush()
    del array
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "keys.npy")], capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["size"] == 1
    # 256 MB of keys. Scores, their ranking and one tile take about 50 bytes a row.
    assert found["growth"] < 100e6
