"""Draw docs/img/choice-of-p.png: what p > 2 finds and x² misses, and what p < 2 saves."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot as plt

import levattention as la

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from strategies import heavy_tailed
from theorems.test_choice_of_p import one_tall_entry, pairs_and_crowds


def tall_entries(axes: plt.Axes) -> None:
    """The largest weight that any query can give the tall entry, as n grows."""
    counts = [100, 300, 1000, 3000, 10_000, 30_000]
    for p, colour in ((4, "tab:blue"), (6, "tab:green")):
        weights = {"own": [], "square": []}
        for n in counts:
            keys = one_tall_entry(n, p)
            weights["own"].append(la.scorers.Sensitivity(la.Power(p)).decide(keys, 0.3)[0].item())
            weights["square"].append(la.leverage_scores(keys)[0].item())
        axes.loglog(counts, weights["own"], color=colour, marker="o", label=f"under |x|^{p}")
        axes.loglog(
            counts, weights["square"], color=colour, marker="s", linestyle="--", label=f"same key under x² (p = {p})"
        )
    axes.set(xlabel="n", ylabel="largest weight of the key", title="One score of n^(1/p), all others of size 1")
    axes.legend()


def small_entries(axes: plt.Axes) -> None:
    """Keys kept so that an entry of relative size ε survives, on two kinds of keys."""
    levels = [0.3, 0.2, 0.1, 0.05, 0.03, 0.02]
    tails = heavy_tailed(50_000, 4)
    for name, make, colour in (
        ("crowds", pairs_and_crowds, "tab:blue"),
        ("heavy tails", lambda eps: tails, "tab:orange"),
    ):
        square = [int(la.universal_set(make(eps), eps=eps**2 / 2).size) for eps in levels]
        absolute = [int(la.universal_set(make(eps), eps=eps / 2, loss=la.Power(1)).size) for eps in levels]
        axes.loglog(levels, square, color=colour, marker="s", linestyle="--", label=f"{name}: x² at ε²/2")
        axes.loglog(levels, absolute, color=colour, marker="o", label=f"{name}: |x| at ε/2")
    axes.loglog(levels, [8 / eps**2 for eps in levels], color="gray", linestyle=":", label="d/(ε²/2) and d/(ε/2)")
    axes.loglog(levels, [8 / eps for eps in levels], color="gray", linestyle=":")
    axes.set(xlabel="relative size ε of the entry to keep", ylabel="|U|", title="Keeping an entry ε next to a 1, d = 4")
    axes.legend()


def main() -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    tall_entries(left)
    small_entries(right)
    target = ROOT / "docs" / "img" / "choice-of-p.png"
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
