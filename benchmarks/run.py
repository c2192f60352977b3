"""One runner for every case: `python benchmarks/run.py [case ...]`.

A case is a module in `cases/` whose `run()` gives a flat dict of figures: times of ours and of named peers from the
same run, and their ratios. Results go to `results/NAME.json` with the commit and the machine. Shared machines are
noisy: read the ratios, not the seconds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent


def machine() -> dict:
    """What the figures were measured on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def commit() -> str:
    """The commit of the working tree, marked where files differ from it."""
    describe = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(describe, cwd=HERE, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> None:
    """Run the named cases, or all of them, and print what they found."""
    known = sorted(path.stem for path in (HERE / "cases").glob("*.py") if not path.stem.startswith("_"))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help=f"any of: {', '.join(known)}")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    chosen = parser.parse_args()
    if unknown := set(chosen.cases) - set(known):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    console = Console()
    for name in chosen.cases or known:
        started = time.perf_counter()
        with console.status(f"running {name}"):
            figures = importlib.import_module(f"cases.{name}").run()
        record = {"case": name, "commit": commit(), "machine": machine(), "figures": figures}
        chosen.out.mkdir(parents=True, exist_ok=True)
        (chosen.out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
        table = Table("figure", "value", title=f"{name} ({time.perf_counter() - started:.0f} s)")
        for label, value in figures.items():
            table.add_row(label, f"{value:.4g}" if isinstance(value, float) else str(value))
        console.print(table)


if __name__ == "__main__":
    main()
