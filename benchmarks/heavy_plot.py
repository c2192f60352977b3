"""Draw `docs/img/heavy-*.png` from `results/heavy.json`: `python benchmarks/heavy_plot.py`."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
SIZES = (10_000, 100_000, 1_000_000, 10_000_000)


def series(figures: dict, name: str) -> tuple[list[int], list[float]]:
    """n and the figure of that name, where it was measured."""
    known = [n for n in SIZES if f"n={n} {name}" in figures]
    return known, [figures[f"n={n} {name}"] for n in known]


def draw(record: dict, folder: Path) -> None:
    """Time of a batch of queries, and bytes held, against n."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figures, machine = record["figures"], record["machine"]
    note = f"d = {figures['d']}, ε = {figures['eps']}, {machine['threads']} thread(s) of {machine['cpu']}"
    times = {
        "HeavyIndex, 64 queries": "query s",
        "brute force (matrix product)": "brute force s",
        "FAISS flat inner product": "faiss s",
        "building HeavyIndex": "build s",
    }
    n, indexed = series(figures, "bytes")
    n_flat, flat = series(figures, "faiss bytes")
    held = {"HeavyIndex": (n, indexed), "FAISS flat, or K itself (fp32)": (n_flat, flat)}
    plots = {
        "heavy-time.png": ("processor seconds", {label: series(figures, name) for label, name in times.items()}),
        "heavy-memory.png": ("bytes held", held),
    }
    for name, (label, lines) in plots.items():
        figure, axes = pyplot.subplots(figsize=(6.4, 4.2), layout="constrained")
        for line, (at, values) in lines.items():
            axes.loglog(at, values, marker="o", label=line, linestyle="--" if line.startswith("building") else "-")
        axes.set(xlabel="keys, n", ylabel=label, title=note)
        axes.title.set_fontsize(8)
        axes.grid(visible=True, which="major", alpha=0.3)
        axes.legend(fontsize=8)
        figure.savefig(folder / name, dpi=120)
        pyplot.close(figure)


if __name__ == "__main__":
    draw(json.loads((HERE / "results" / "heavy.json").read_text()), HERE.parent / "docs" / "img")
