"""What Nsight Compute says of every kernel, from its long table to a short one.

    ncu --clock-control none --profile-from-start off --csv --page raw --section SpeedOfLight --section WarpStateStats \
        python benchmarks/gpu.py --profile > ncu.csv
    python benchmarks/gpu_profile.py ncu.csv benchmarks/results/h200-profile.json

For each kernel: microseconds, per cent of the peaks of DRAM and of the multiprocessors, and what its warps wait for
most when they do not issue. ncu flushes the caches before each kernel, which so takes longer than in a row of others.
"""

import csv
import json
import sys
from pathlib import Path

import gpu_times

TIME = "gpu__time_duration.sum"
SHARES = {
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
STALL = "smsp__average_warps_issue_stalled_"
# A kernel of this name stands between one shape and the next.
BORDER = "erfinv"


def number(text):
    return float(text.replace(",", ""))


def waits(row):
    """What a warp waits for most between two instructions, besides its turn, and how many cycles on average."""
    end = "_per_issue_active.ratio"
    found = {
        key[len(STALL) : -len(end)]: number(row[key]) for key in row if key.startswith(STALL) and key.endswith(end)
    }
    reason = max((key for key in found if key != "selected"), key=found.get)
    return {"waits_for": reason, "cycles": found[reason]}


def kernels(path):
    """The rows of ncu's table by shape, in the order of `gpu_times.profile`."""
    lines = path.read_text(errors="replace").splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise SystemExit(f"{path}: expected ncu's CSV with a line of names, and there is none")
    units, *rows = csv.DictReader(lines[start:])
    if units[TIME] not in ("ns", "us"):
        raise SystemExit(f"{path}: expected times in ns or us, got {units[TIME]}")
    parts = []
    for row in rows:
        name = row["Kernel Name"]
        if BORDER in name:
            parts.append([])
        elif name.startswith("_") and parts:
            us = number(row[TIME]) / (1000 if units[TIME] == "ns" else 1)
            shares = {key: number(row[column]) for key, column in SHARES.items()}
            grid = [int(size) for size in row["Grid Size"].strip("()").split(",")]
            parts[-1].append({"kernel": name.strip("_"), "grid": grid, "us": round(us, 1), **shares, **waits(row)})
    return parts


def main():
    source, target = (Path(name) for name in sys.argv[1:])
    parts = kernels(source)
    names = ["x".join(map(str, shape)) for shape in gpu_times.PROFILED] + [f"causal, n = {gpu_times.PROMPTS[-1]}"]
    table = dict(zip(names, parts, strict=False))
    target.write_text(json.dumps(table, indent=1) + "\n")
    for name, rows in table.items():
        print(f"\n{name}\n| kernel | µs | DRAM % | SM % | waits for |\n|---|---|---|---|---|")
        for row in rows:
            what = f"{row['waits_for']} ({row['cycles']:.1f})"
            print(f"| {row['kernel']} | {row['us']} | {row['dram_percent']:.0f} | {row['sm_percent']:.0f} | {what} |")


if __name__ == "__main__":
    main()
