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
from strategies import heavy_tailed  # noqa: E402 (found through the path above)
from theorems.test_choice_of_p import one_tall_entry, pairs_and_crowds  # noqa: E402


def tall_entries(axes: plt.Axes) -> None:
    """What the query along the first axis gives the tall entry, and the most any query gives it under x²."""
    counts = [100, 300, 1000, 3000, 10_000, 30_000]
    for p, colour in ((4, "tab:blue"), (6, "tab:green")):
        own, square = [], []
        for n in counts:
            keys = one_tall_entry(n, p)
            values = la.Power(p)(keys[:, 0])
            own.append((values[0] / values.sum()).item())
            square.append(la.leverage_scores(keys)[0].item())
        axes.loglog(counts, own, color=colour, marker="o", label=f"one query, under |x|^{p}")
        axes.loglog(counts, square, color=colour, marker="s", linestyle="--", label=f"best query, under x² (p = {p})")
    axes.set(xlabel="n", ylabel="weight of the key", title="One score of n^(1/p), all others of size 1")
    axes.legend()


def small_entries(axes: plt.Axes) -> None:
    """Keys kept so that an entry of relative size ε survives, on two kinds of keys."""
    levels = [0.3, 0.2, 0.1, 0.05, 0.02]
    tails = heavy_tailed(20_000, 4)
    for name, make, colour in (
        ("crowds", pairs_and_crowds, "tab:blue"),
        ("heavy tails", lambda eps: tails, "tab:orange"),
    ):
        square = [int(la.universal_set(make(eps), eps=eps**2 / 2).size) for eps in levels]
        absolute = [int(la.universal_set(make(eps), eps=eps / 2, loss=la.Power(1)).size) for eps in levels]
        print(name, levels, "x²:", square, "|x|:", absolute)
        axes.plot(levels, square, color=colour, marker="s", linestyle="--", label=f"{name}: x² at ε²/2")
        axes.plot(levels, absolute, color=colour, marker="o", label=f"{name}: |x| at ε/2")
    axes.plot(levels, [8 / eps**2 for eps in levels], color="gray", linestyle=":", label="d/(ε²/2) and d/(ε/2)")
    axes.plot(levels, [8 / eps for eps in levels], color="gray", linestyle=":")
    axes.set(xscale="log", yscale="symlog", ylim=(-0.2, None), xticks=levels, xticklabels=levels)
    axes.minorticks_off()
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
