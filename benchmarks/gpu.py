"""LevAttention on one GPU: every kernel checked against fp64, then timed beside full attention.

    python benchmarks/gpu.py [--out benchmarks/results/h200.json]
    compute-sanitizer python benchmarks/gpu.py --sanitize
    ncu ... python benchmarks/gpu.py --profile        (gpu_profile.py says how, and shortens what it prints)
    python benchmarks/gpu.py --plot benchmarks/results/h200.json docs/img/gpu.png
    python benchmarks/gpu.py --rehearse

What fails its check gets no time. Checks and a rehearsal, which compiles what will be timed, go first, several
processes at once; times are then taken alone. `floor_ms` is the time of reading K twice and Q once and writing O once
at the copy bandwidth measured in the same run. `--rehearse` alone runs everything once and times nothing; without a
GPU it takes tiny shapes and Triton's interpreter, and shows that this script is whole.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

import gpu_checks
import gpu_times

ROOT = gpu_checks.ROOT
CUDA = gpu_checks.DEVICE == "cuda"
# What each part of the result needs to have passed.
PARTS = {
    "rows": "set",
    "residual_rows": "set",
    "causal": "causal",
    "stages": "set",
    "leverage_scores": "set",
    "kappa": "set",
    "peak_memory": "set",
}
# Parts that are rehearsed in one process.
REHEARSALS = (["rows"], ["residual_rows"], ["causal"], ["stages", "leverage_scores"])


def sized(shapes):
    return shapes if CUDA else [gpu_times.TINY]


def rows(shapes, bandwidth, residuals=(None,)):
    """The rows of some shapes, under the table's head."""
    print(gpu_times.HEADER)
    found = []
    for shape in sized(shapes):
        found += gpu_times.time_row(shape, bandwidth, residuals)
        if CUDA:
            torch.cuda.empty_cache()
    return found


def part(name, bandwidth):
    """One part of the result."""
    prompts = {} if CUDA else {"prompts": (64,), "h": 2, "d": 16, "k": 5, "window": 8}
    kappa = {} if CUDA else {"n": 200, "d": 16, "k": 5, "heads": 1}
    run = {
        "rows": lambda: rows(gpu_times.ROWS, bandwidth),
        "residual_rows": lambda: rows(gpu_times.RESIDUAL_ROWS, bandwidth, tuple(gpu_times.RESIDUALS)),
        "causal": lambda: gpu_times.causal_prefill(**prompts),
        "stages": lambda: {str(shape): gpu_times.stages(*shape) for shape in sized(gpu_times.STAGES)},
        "leverage_scores": lambda: gpu_times.leverage_scores(*sized([gpu_times.SCORES])[0]),
        "kappa": lambda: gpu_times.against_condition_number(**kappa),
        "peak_memory": lambda: gpu_times.peak_memory() if CUDA else None,
    }
    print(f"\n{name}", flush=True)
    try:
        return run[name]()
    except Exception:
        traceback.print_exc(limit=4)
        return None


def checked(types, parts):
    """The figures of all checks, and meanwhile a rehearsal of the parts, a process for each."""
    command = [sys.executable, __file__]
    with tempfile.TemporaryDirectory() as folder:
        whole = [(name, kind) for name in types for kind in gpu_checks.KINDS]
        found = [Path(folder) / f"{name}-{kind}.json" for name, kind in whole]
        commands = [
            [*command, "--checks-into", path, "--types", name, "--kinds", kind]
            for (name, kind), path in zip(whole, found, strict=True)
        ]
        together = [[name for name in names if name in parts] for names in REHEARSALS]
        commands += [[*command, "--rehearse", "--only", *names] for names in together if names]
        # A check's lines say which type they are about; what a rehearsal shows comes again with its times.
        quiet = [None] * len(found) + [subprocess.DEVNULL] * (len(commands) - len(found))
        for process in [subprocess.Popen(c, stdout=out) for c, out in zip(commands, quiet, strict=True)]:
            process.wait()
        return [figure for path in found if path.is_file() for figure in json.loads(path.read_text())]


def passed(figures, kind, types):
    """Whether all types were checked in a kind, and nothing failed."""
    these = [figure for figure in figures if figure["kind"] == kind]
    return {figure["dtype"] for figure in these} >= set(types) and all(figure["passed"] for figure in these)


def plot(source, target):
    """Time against n, full attention and LevAttention, forward and forward + backward."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [r for r in json.loads(Path(source).read_text())["rows"] if r["d"] == 128 and r["mode"] == "eager"]
    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for field, label, style in (
        ("sdpa_fb_ms", "full attention, forward + backward", "C3--"),
        ("sdpa_ms", "full attention, forward", "C3-"),
        ("lev_fb_ms", "LevAttention, forward + backward", "C0--"),
        ("lev_ms", "LevAttention, forward", "C0-"),
        ("floor_ms", "memory floor, forward", "k:"),
    ):
        points = [(r["n"], r[field]) for r in rows if r[field] is not None]
        axes.loglog(*zip(*points, strict=True), style, marker="o", markersize=3, label=label)
    axes.set(xlabel="keys n", ylabel="milliseconds", title="16 heads, d = 128, 128 keys kept, bf16, one H200")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(target, dpi=150)


def commit():
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return result.stdout.strip() or None


def measure(options):
    """Checks, then times, into one file; 0 if all passed."""
    import triton

    result = {
        "machine": torch.cuda.get_device_name(),
        "commit": options.commit or commit(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_gb_s": None,
        "checks": [],
        "rows": [],
    }
    if options.only and options.out.is_file():
        earlier = json.loads(options.out.read_text())
        if earlier["commit"] != result["commit"]:
            raise SystemExit(f"{options.out} was measured at {earlier['commit']}, this is {result['commit']}")
        result = earlier
    options.out.parent.mkdir(parents=True, exist_ok=True)
    wanted = options.only or ["checks", *PARTS]

    def save():
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    if "checks" in wanted:
        result["checks"] = checked(options.types, options.rehearsed or wanted)
        save()
    good = {kind: passed(result["checks"], kind, options.types) for kind in gpu_checks.KINDS}
    wanted = [name for name in wanted if name in PARTS]
    if wanted:
        result["copy_gb_s"] = gpu_times.copy_bandwidth() / 1e9
        print({key: result[key] for key in ("machine", "torch", "triton", "copy_gb_s")})
    for name in wanted:
        if not good[PARTS[name]]:
            print(f"\n{name}: not timed, a check failed or was not made")
            continue
        result[name] = part(name, result["copy_gb_s"] * 1e9)
        torch.cuda.empty_cache()
        save()
    print(f"\n{gpu_times.HEADER}")
    for row in [*result["rows"], *(result.get("residual_rows") or [])]:
        print(gpu_times.line(row))
    for figure in result["checks"]:
        if not figure["passed"]:
            print(gpu_checks.told(figure))
    return 0 if all(good.values()) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "h200.json")
    parser.add_argument("--only", nargs="+", choices=["checks", *PARTS], help="these parts, into an earlier result")
    parser.add_argument("--types", nargs="+", choices=list(gpu_checks.DTYPES), default=list(gpu_checks.DTYPES))
    parser.add_argument("--rehearse", action="store_true", help="run everything once, time and write nothing")
    parser.add_argument("--rehearsed", nargs="+", choices=list(PARTS), help="with --only checks: rehearse these parts")
    parser.add_argument("--sanitize", action="store_true", help="run every kernel once on tiny shapes, and stop")
    parser.add_argument("--profile", action="store_true", help="run attend for a profiler, and stop")
    parser.add_argument("--plot", nargs=2, metavar=("JSON", "PNG"), help="draw the figure from a result, and stop")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    parser.add_argument("--checks-into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", default=list(gpu_checks.KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plot:
        return plot(*options.plot)
    torch.manual_seed(0)
    if options.checks_into:
        figures = gpu_checks.checks(options.types, {kind: gpu_checks.SHAPES[kind] for kind in options.kinds})
        options.checks_into.write_text(json.dumps(figures))
        return 0
    if options.sanitize:
        return gpu_checks.sanitize(options.types)
    if options.profile:
        return gpu_times.profile() if CUDA else gpu_times.profile([gpu_times.TINY], 64)
    if options.rehearse:
        gpu_times.rehearsal = True
        wanted = options.only or ["checks", *PARTS]
        figures = gpu_checks.checks(options.types, gpu_checks.TINY) if "checks" in wanted else []
        for name in wanted:
            if name in PARTS:
                part(name, None)
        # The interpreter cuts bf16 off where a GPU rounds, so errors are not judged here.
        return 1 if any("error" in figure for figure in figures) else 0
    if not CUDA:
        parser.error("this machine has no CUDA device; --rehearse runs tiny shapes without one")
    return measure(options)


if __name__ == "__main__":
    sys.exit(main())
