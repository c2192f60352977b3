"""The paper's training table in small: every row of a file of recipes, trained for some seeds, and one table of it all.

    python experiments/vit/train_table.py --data cifar10 --out runs

Runs `levattention vit train` for each row and seed (rows that are finished are left as they are, one that was stopped
goes on), `--jobs` at a time and every row's first seed before any second one; tests every softmax-trained model under
each selector without training; and writes table.md and table.json to `out` after each of these. Accuracy is the mean
over seeds; ± is half of its 95 % interval by Student's t. A picture of one or more such tables, a panel each:

    python experiments/vit/train_table.py --plot runs/table.json runs.png
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# At once, here: transformers brings in its parts when they are asked for, and fails where two threads ask together.
from transformers import ViTConfig, ViTForImageClassification  # noqa: F401

from levattention.vision import Recipe, load_recipe, load_vit, open_images
from levattention.vision.evaluate import evaluate
from levattention.vision.runfolder import read_metrics

HERE = Path(__file__).resolve().parent
BOTH = ["softmax", "cluster_32", "leverage_32", "norm_32", "random_32", "leverage_64", "leverage_128"]
ROWS = [*(f"p2_{name}" for name in [*BOTH, "heavy_cluster_32", "sample_32"]), *(f"p1_{name}" for name in BOTH)]
MAIN = [f"p2_{name}" for name in BOTH[:5]]
# The 97.5 % points of Student's t with 1, 2, … degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
BUDGETS = (32, 64, 128)
SELECTORS = ("leverage", "norm", "random", "local", "sample", "cluster")
PROGRAM = "from levattention.cli import main; main()"


def finished(folder: Path, recipe: Recipe) -> dict[str, Any] | None:
    """The last test of a run of this recipe that reached its end."""
    if not (folder / "metrics.jsonl").is_file():
        return None
    about = json.loads((folder / "recipe.json").read_text())
    if about["recipe"] != json.loads(json.dumps(recipe.as_dict())):
        return None  # which `--resume` will refuse, saying what differs
    lines = [line for line in read_metrics(folder) if "top1" in line]
    return lines[-1] if lines and lines[-1]["step"] == about["steps"] else None


def run(row: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train a row, or go on with it; its last test."""
    folder = given.out / f"{row}-seed{seed}"
    # Random positions are drawn anew with each seed.
    drawn = [f"selection.seed={seed * 1000}"] if row.endswith("random_32") else []
    changes = [f"seed={seed}", *drawn, *given.set]
    recipe = load_recipe(f"{given.recipes}:{row}", dict(change.split("=", 1) for change in changes))
    if finished(folder, recipe) is None:
        command = [sys.executable, "-c", PROGRAM, "vit", "train", f"{given.recipes}:{row}", "--data", str(given.data)]
        command += ["--out", str(folder), "--resume"]
        command += [part for change in changes for part in ("--set", change)]
        command += ["--count", str(given.count)] if given.count else []
        command += ["--test-count", str(given.test_count)] if given.test_count else []
        subprocess.run(command + (["--cpu"] if given.cpu else []), check=True)
    last = finished(folder, recipe)
    assert last is not None
    return last


def untrained(folder: Path, given: argparse.Namespace) -> dict[str, float]:
    """Top-1 of a softmax-trained model under each selector and budget."""
    count = given.selector_count or given.test_count
    kept = folder / f"selectors-{count or 'all'}.json"
    if kept.is_file() and kept.stat().st_mtime >= (folder / "model.safetensors").stat().st_mtime:
        return json.loads(kept.read_text())
    model, preprocess = load_vit(folder)
    model.to("cpu" if given.cpu else "cuda")
    images = open_images(given.data, split="test", count=count)
    rows = evaluate(model, images, preprocess, selectors=SELECTORS, budgets=BUDGETS, batch=100)
    found = {f"{row['method']} {row['top_k']}": row["top1"] for row in rows if row["top_k"] is not None}
    kept.write_text(json.dumps(found, indent=1))
    return found


def summary(values: list[float]) -> str:
    """Mean and half the 95 % interval, in per cent."""
    mean = sum(values) / len(values)
    if len(values) == 1:
        return f"{100 * mean:.2f}"
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
    degrees = min(len(values) - 2, len(STUDENT) - 1)
    return f"{100 * mean:.2f} ± {100 * STUDENT[degrees] * deviation / math.sqrt(len(values)):.2f}"


def write(out: Path, results: dict[str, dict[str, Any]], lossy: bool) -> None:
    """table.json and table.md."""
    (out / "table.json").write_text(json.dumps({"lossy": lossy, "rows": results}, indent=1))
    lines = ["The images were re-encoded with loss (WebP) before training and testing.", ""] if lossy else []
    lines += ["| row | seeds | top-1 % | minutes each |", "|---|---|---|---|"]
    for row, found in results.items():
        values = list(found["top1"].values())
        minutes = found["seconds"] / 60
        lines.append(f"| {row} | {', '.join(found['top1'])} | {summary(values)} | {minutes:.1f} |")
    (out / "table.md").write_text("\n".join(lines) + "\n")


def table(given: argparse.Namespace, found: dict[tuple[str, int], tuple[dict[str, Any], dict[str, float]]]) -> None:
    """Write what has been found so far: the rows in the order asked for, then softmax under every selector."""
    trained: dict[str, dict[str, Any]] = {}
    tested: dict[str, dict[str, Any]] = {}
    for row in given.rows:
        for seed in given.seeds:
            if (row, seed) not in found:
                continue
            last, selectors = found[row, seed]
            mine = trained.setdefault(row, {"top1": {}, "seconds": last["seconds"]})
            mine["top1"][str(seed)] = last["top1"]
            for name, top1 in selectors.items():
                other = tested.setdefault(f"{row}, tested with {name}", {"top1": {}, "seconds": 0.0})
                other["top1"][str(seed)] = top1
    # WebP sheets are taken to be compressed with loss, as those of the measured runs are.
    write(given.out, trained | tested, any(given.data.glob("*.webp")))


def plot(sources: list[Path], target: Path) -> None:
    """Top-1 of every row, a dot for each seed: trained, and at the largest budgets below tested only."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    tables = [json.loads(source.read_text()) for source in sources]
    size = [len(table["rows"]) for table in tables]
    figure, axes = plt.subplots(
        len(tables), 1, figsize=(7, 1.4 + 0.24 * sum(size)), height_ratios=size, squeeze=False, layout="constrained"
    )
    for ax, table in zip(axes[:, 0], tables, strict=True):
        for place, (row, found) in enumerate(table["rows"].items()):
            values = [100 * value for value in found["top1"].values()]
            colour = "C1" if ", tested with " in row else "C0"
            ax.barh(place, sum(values) / len(values), color=colour, alpha=0.35, height=0.7)
            ax.plot(values, [place] * len(values), "o", color=colour, markersize=3.5)
            ax.text(1, place, f"{sum(values) / len(values):.1f}", va="center", fontsize=8)
        ax.set_yticks(range(len(table["rows"])), [row.replace("_", " ") for row in table["rows"]], fontsize=8)
        ax.margins(y=0.02)
        ax.invert_yaxis()
        ax.set_xlabel("top-1, per cent" + (" (images re-encoded with loss)" if table["lossy"] else ""), fontsize=9)
        ax.grid(axis="x", alpha=0.3)
    figure.savefig(target, dpi=130)


def main() -> None:
    """Trains every row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", type=Path, nargs="+", metavar="FILE", help="table.json … and a PNG to draw, and stop")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--recipes", type=Path, default=HERE / "configs" / "cifar.py")
    parser.add_argument("--rows", nargs="+", default=ROWS)
    parser.add_argument("--main", nargs="+", default=MAIN, help="rows trained with every seed; others with the first")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time")
    parser.add_argument("--set", nargs="+", action="extend", default=[], help="NAME=VALUE for every recipe")
    parser.add_argument("--count", type=int, help="train on the first so many images")
    parser.add_argument("--test-count", type=int, help="test on the first so many images")
    parser.add_argument("--selector-count", type=int, help="the same for softmax-trained models under every selector")
    parser.add_argument("--selector-seeds", type=int, nargs="+", help="only these seeds under every selector")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args()
    if given.plot:
        if len(given.plot) < 2:
            parser.error("--plot: expected at least one table.json, then a PNG")
        return plot(given.plot[:-1], given.plot[-1])
    if given.data is None or given.out is None:
        parser.error("--data and --out: expected both")
    given.out.mkdir(parents=True, exist_ok=True)
    found: dict[tuple[str, int], tuple[dict[str, Any], dict[str, float]]] = {}
    lock = threading.Lock()

    def one(row: str, seed: int) -> None:
        started = time.perf_counter()
        last = run(row, seed, given)
        with lock:
            found[row, seed] = last, {}
            table(given, found)
        shown = row.endswith("softmax") and seed in (given.selector_seeds or given.seeds)
        selectors = untrained(given.out / f"{row}-seed{seed}", given) if shown else {}
        with lock:
            found[row, seed] = last, selectors
            table(given, found)
        print(f"{row}, seed {seed}: {100 * last['top1']:.2f} % ({time.perf_counter() - started:.0f} s)", flush=True)

    with ThreadPoolExecutor(given.jobs) as pool:
        firsts = [(row, given.seeds[0]) for row in given.rows]
        others = [(row, seed) for seed in given.seeds[1:] for row in given.rows if row in given.main]
        for done in [pool.submit(one, *which) for which in firsts + others]:
            done.result()


if __name__ == "__main__":
    main()
