"""DeiT-Ti/16 without retraining: how much of its accuracy is left when every query sees k slots a head.

    python experiments/vit/deit_inference.py --data ../shared/data --out results

`data` holds vit/deit_tiny_patch16_224.safetensors (timm's names) and imagenet-dev (labels.csv and images). Writes
deit_inference.md, .json and .png to `out`. On one CPU core a row takes about a minute for 500 images.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import levattention as la
from levattention.integrations.huggingface import use_full_attention, use_lev_attention
from levattention.residuals import Cluster, Sample
from levattention.vision import labelled_images, vit_from_timm

# Positions that are drawn differ from layer to layer: a patch that no layer ever sees is lost for good.
DEPTH = 12
METHODS: dict[str, dict[str, Any]] = {
    "clusters": {"residual": Cluster()},
    "clusters, without queries": {"residual": Cluster(use_queries=False, tangents=0)},
    "leverage": {},
    "row norm": {"scorer": la.scorers.Norm()},
    "random positions": {"layers": {i: {"scorer": la.scorers.Random(i)} for i in range(DEPTH)}},
    "leverage + local tokens (Manhattan 3)": {"window": la.Grid(14, 14, 3, prefix=1)},
    "leverage ¼, rest sampled": {"layers": {i: {"residual": Sample(seed=i)} for i in range(DEPTH)}},
}


def predict(model: Any, pixels: Tensor, batch: int) -> Tensor:
    """The class of each image."""
    with torch.inference_mode():
        return torch.cat([model(pixel_values=part).logits.argmax(-1) for part in pixels.split(batch)])


def measure(
    model: Any, pixels: Tensor, labels: Tensor, full: Tensor | None, batch: int
) -> tuple[dict[str, Any], Tensor]:
    """Top-1 accuracy in per cent of the first half, the last half and all images, and agreement with full attention."""
    start = time.perf_counter()
    predicted = predict(model, pixels, batch)
    seconds = time.perf_counter() - start
    right, half = (predicted == labels).double() * 100, len(labels) // 2
    agree = 100.0 if full is None else float((predicted == full).double().mean() * 100)
    row = {"first": float(right[:half].mean()), "last": float(right[half:].mean()), "all": float(right.mean())}
    # One standard deviation of a proportion over this many images.
    row["plus_minus"] = 100 * math.sqrt(row["all"] / 100 * (1 - row["all"] / 100) / len(labels))
    return {**row, "agree": agree, "seconds": round(seconds, 1)}, predicted


def table(rows: list[dict[str, Any]], count: int) -> str:
    """The rows as Markdown."""
    half = count // 2
    lines = [
        f"| DeiT-Ti/16, {count} images, top-1 % | k | first {half} | last {count - half} | all | agrees with full |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        k = row["top_k"] or "–"
        cells = [f"{row['first']:.1f}", f"{row['last']:.1f}", f"{row['all']:.1f} ± {row['plus_minus']:.1f}"]
        lines.append(" | ".join([f"| {row['method']}", str(k), *cells, f"{row['agree']:.1f} |"]))
    return "\n".join(lines) + "\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy against the budget, a line a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    axes.axhline(rows[0]["all"], color="black", linestyle="--", label="full attention (197 keys)")
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        points = sorted((row["top_k"], row["all"], row["plus_minus"]) for row in rows[1:] if row["method"] == method)
        k, accuracy, error = zip(*points, strict=True)
        axes.errorbar(k, accuracy, yerr=error, marker="o", capsize=3, label=method)
    axes.set(xlabel="slots a head, k", ylabel="top-1 accuracy, %", xscale="log", ylim=(0, 100))
    budgets = sorted({row["top_k"] for row in rows[1:]})
    axes.set_xticks(budgets, [str(k) for k in budgets])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    """Runs every method at every budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    homes = [up / "shared" / "data" for up in Path(__file__).resolve().parents]
    default = next((home for home in homes if home.is_dir()), Path("..") / "shared" / "data")
    parser.add_argument("--data", type=Path, default=default, help=f"folder with vit/ and imagenet-dev/ ({default})")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--images", type=int, default=500)
    parser.add_argument("--top-k", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--batch", type=int, default=25)
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    arguments = parser.parse_args()
    weights = arguments.data / "vit" / "deit_tiny_patch16_224.safetensors"
    if not weights.is_file():
        parser.error(f"--data: {weights} does not exist")
    arguments.out.mkdir(parents=True, exist_ok=True)
    model = vit_from_timm(weights)
    pixels, labels = labelled_images(arguments.data / "imagenet-dev", arguments.images)

    found, full = measure(use_full_attention(model), pixels, labels, None, arguments.batch)
    rows = [{"method": "full attention", "top_k": None, **found}]
    cases = [(method, k) for method in arguments.methods for k in arguments.top_k]
    for done, (method, top_k) in enumerate([("", None), *cases]):
        if top_k is not None:
            use_lev_attention(model, top_k=top_k, **METHODS[method])
            found, _ = measure(model, pixels, labels, full, arguments.batch)
            rows.append({"method": method, "top_k": top_k, **found})
        print(f"[{done}/{len(cases)}] {rows[-1]}", flush=True)
        # Written after every row, so that an interrupted run leaves what it found.
        (arguments.out / "deit_inference.json").write_text(json.dumps({"images": len(labels), "rows": rows}, indent=1))
        (arguments.out / "deit_inference.md").write_text(table(rows, len(labels)))
    if len(rows) > 1:
        plot(rows, arguments.out / "deit_inference.png")


if __name__ == "__main__":
    main()
