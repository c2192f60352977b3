"""The planted model as a report: one HTML page with its pictures inside, and the numbers beside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from levattention.pages import canvas, grid_table, page, percent, picture, shown, summary_table, write
from levattention.planted.sweep import DELTA_SIZES, Row, Sweep, run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUES = ("#9ecae1", "#4292c6", "#08306b")


def run_planted(sweep: Sweep, out: Path, screen: Console, notices: Console) -> None:
    """Run the sweep, show its summary, and write planted.html, its pictures and planted.json into `out`."""
    out.mkdir(parents=True, exist_ok=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notices, transient=True) as progress:
        task = progress.add_task("planted model", total=sweep.steps)
        begun: list[str] = []

        def tick(label: str) -> None:
            progress.update(task, description=label, completed=len(begun))
            begun.append(label)

        found = run(sweep, tick)
        progress.update(task, completed=sweep.steps)
    pictures = {name: picture(draw(found)) for name, draw in DRAWINGS.items()}
    for name, png in pictures.items():
        write(out / f"planted-{name}.png", png)
    write(out / "planted.json", json.dumps(found, indent=1, allow_nan=False, ensure_ascii=False).encode())
    write(out / "planted.html", report_page(found, pictures).encode())
    table = Table(title="Planted model", show_header=False)
    for name, value in summary(found):
        table.add_row(name, value)
    screen.print(table)
    screen.print(f"Report: {out / 'planted.html'}", soft_wrap=True)


def summary(found: dict[str, Any]) -> list[tuple[str, str]]:
    """What the sweep says, a line each."""
    rows, times = found["settings"], found["scaling"]
    good = [row for row in rows if row["recovered"] is not None]
    asked = found["sweep"]["count"] * (len(good) + len(times))
    exact = sum(row["recovered"] for row in [*good, *times]) * found["sweep"]["count"]
    false = sum(row["false_keys"] for row in [*good, *times])
    over = sum(row["delta1"] > row["delta1_paper"] for row in rows)
    lines = [
        ("settings of the block Gaussian", f"{len(rows)}; the assumptions hold in {len(good)}"),
        ("queries where they hold", f"{asked:,}; exactly recovered {round(exact):,}; false keys {false}"),
        ("S ⊆ U′", f"in {sum(row['standout_kept'] == 1 for row in rows)} of {len(rows)} settings"),
        ("δ1 above the paper's 4/k", f"in {over} of {len(rows)} settings"),
    ]
    trusting = [row["paper_recovered"] for row in rows if row["paper_recovered"] is not None]
    if trusting:
        lines.append(("recovered with the paper's δ1, δ2", f"{sum(trusting) / len(trusting):.1%} of queries"))
        threshold = [row["paper_threshold_recovered"] for row in rows if row["paper_threshold_recovered"] is not None]
        lines.append(("… with its δ1 and the measured ρ", f"{sum(threshold) / len(threshold):.1%} of queries"))
    if times:
        first, last = times[0], times[-1]
        lines.append(
            (
                f"one query, n = {first['n']:,} → {last['n']:,}",
                f"{seconds(first['query_seconds'])} → {seconds(last['query_seconds'])}; a scan of all keys "
                f"{seconds(first['scan_seconds'])} → {seconds(last['scan_seconds'])}",
            )
        )
    return lines


def seconds(value: float) -> str:
    """A duration in a unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e-6:.3g} µs"


def draw_delta1(found: dict[str, Any]) -> Figure:
    """δ1 against k: measured, as the paper assumes, and as random directions have it."""
    figure, (axes,) = canvas()
    for size, colour in zip(DELTA_SIZES, (BLUES[1], BLUES[2]), strict=True):
        rows = [row for row in found["delta1"] if row["size"] == size]
        ks = [row["k"] for row in rows]
        for row in rows:
            axes.plot([row["k"]] * len(row["measured"]), row["measured"], "o", color=colour, alpha=0.6, markersize=4)
        axes.plot(ks, [row["expected"] for row in rows], color=colour, label=f"√(2 ln(|S|²/2)/k), |S| = {size}")
    axes.plot([], [], "o", color="gray", markersize=4, label="measured, five seeds each")
    axes.plot(ks, [row["paper"] for row in rows], "--", color="tab:red", label="4/k, as the paper assumes")
    axes.axhspan(0.25, 10, color="tab:gray", alpha=0.15, linewidth=0)
    axes.text(ks[-1], 0.28, "over ¼: no query can have a relevant key", ha="right", va="bottom", fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="k, the dimension of V", ylabel="δ1", ylim=(1.5e-3, 2.5))
    axes.set_title("The block Gaussian's δ1 falls as 1/√k, not as 1/k", loc="left")
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.legend(loc="lower left", fontsize=9)
    return figure


def draw_candidates(found: dict[str, Any]) -> Figure:
    """|U|/n and |U′|/n against ε1, a panel for each k."""
    ks, ns = (sorted({row[name] for row in found["settings"]}) for name in ("k", "n"))
    figure, panels = canvas(len(ks), width=3.6 * max(2, len(ks)), height=4.4, sharey=True)
    colours = shades(len(ns))
    for axes, k in zip(panels, ks, strict=True):
        for n, colour in zip(ns, colours, strict=True):
            rows = sorted((r for r in found["settings"] if (r["k"], r["n"]) == (k, n)), key=lambda row: row["eps1"])
            eps1 = [row["eps1"] for row in rows]
            axes.plot(eps1, [row["universal"] / n for row in rows], "o-", color=colour, label=f"|U|/n, n = {n:,}")
            axes.plot(eps1, [row["candidates"] / n for row in rows], "s--", color=colour, mfc="white", label="|U′|/n")
        limit = min(row["largest_eps1"] for row in found["settings"] if row["k"] == k)
        axes.axvline(limit, color="tab:red", linestyle=":", label="δ2² expected to reach 1/d")
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set(xlabel="ε1")
        axes.set_title(f"k = {k}", loc="left")
    panels[0].set_ylabel("share of the keys")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(ns) + 1, fontsize=9)
    figure.suptitle("U and U′ are small for small ε1 only; beyond, they are nearly every key", x=0.01, ha="left")
    return figure


def draw_recovery(found: dict[str, Any]) -> Figure:
    """A map of the settings: where the assumptions hold, what is recovered, and what the paper's δ would give."""
    rows = {(row["k"], row["n"], row["eps1"]): row for row in found["settings"]}
    ks, ns, eps1s = (sorted({setting[i] for setting in rows}) for i in range(3))
    figure, panels = canvas(
        len(ks), width=1.0 + 1.05 * len(ks) * max(3, len(eps1s)), height=1.9 + 0.95 * len(ns), sharey=True
    )
    for axes, k in zip(panels, ks, strict=True):
        for (own_k, n, eps1), row in rows.items():
            if own_k == k:
                paint(axes, eps1s.index(eps1), ns.index(n), row)
        axes.grid(False)
        axes.set_xticks(range(len(eps1s)), [f"{eps1:g}" for eps1 in eps1s])
        axes.set_yticks(range(len(ns)), [f"n = {n:,}" for n in ns])
        axes.set(xlabel="ε1", xlim=(-0.5, len(eps1s) - 0.5), ylim=(-0.5, len(ns) - 0.5))
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(f"k = {k}", loc="left")
    figure.suptitle(
        "Queries recovered exactly (blue), or what rules every query out (grey); "
        "below, with the paper's δ1 = 4/k and δ2 = 4ε1/k",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    return figure


def paint(axes: Any, x: int, y: int, row: Row) -> None:
    """One cell of the map."""
    recovered = row["recovered"]
    colour = "#dddddd" if recovered is None else BLUES[2]
    ink = "black" if recovered is None else "white"
    axes.bar(x, 0.92, width=0.94, bottom=y - 0.46, color=colour)
    reason = f"δ1 = {row['delta1']:.2f}" if row["max_relevant"] < 1 else "δ2 > δ1"
    told = reason if recovered is None else f"{recovered:.0%}"
    axes.text(x, y + 0.12, told, ha="center", va="center", color=ink, fontsize=10 if recovered is None else 13)
    paper = row["paper_recovered"]
    trusted = "paper: no query" if paper is None else f"paper's δ: {paper:.0%}"
    axes.text(x, y - 0.24, trusted, ha="center", va="center", color=ink, fontsize=8)


def draw_time(found: dict[str, Any]) -> Figure:
    """Seconds against n: to prepare, to answer from U′, and to scan."""
    rows = found["scaling"]
    figure, (axes,) = canvas()
    series = (
        ("recover_seconds", "s-", "tab:gray", "prepare the keys, once"),
        ("scan_seconds", "^-", "tab:red", "one query, scan of all keys"),
        ("query_seconds", "o-", BLUES[2], "one query, from U′"),
        ("batch_seconds", "o--", BLUES[1], "one query of a batch, from U′"),
    )
    for name, style, colour, label in series:
        axes.plot([row["n"] for row in rows], [row[name] for row in rows], style, color=colour, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set(xlabel="n, the number of keys", ylabel="seconds")
    axes.set_title("A query costs the same at every n", loc="left")
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    return figure


def shades(count: int) -> Sequence[Any]:
    """Colours from light to dark."""
    if count <= len(BLUES):
        return BLUES[-count:]
    from matplotlib import colormaps

    return [colormaps["Blues"](0.3 + 0.7 * i / (count - 1)) for i in range(count)]


DRAWINGS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "delta1": draw_delta1,
    "candidates": draw_candidates,
    "recovery": draw_recovery,
    "time": draw_time,
}

CAPTIONS = {
    "delta1": "The paper's example assumes δ1 ≥ 4/k. The largest cosine among |S| random directions is near "
    "√(2 ln(|S|²/2)/k), which is larger at every k over 8/ln(|S|²/2). A query can have a relevant key only where "
    "δ1 ≤ ¼.",
    "candidates": "U holds the keys whose leverage reaches ρ, U′ those whose own share of their attention row does. "
    "ρ = 1/(1 + δ1²|S| + δ2²n) must stay well over d/n, which asks for ε1 well under k/(d ln n).",
    "recovery": "A query counts where exactly its relevant keys come out. The paper's δ1 and δ2 put ρ too high, so "
    "that U′ loses stand-out keys; even at the measured ρ the threshold 2δ1 is too low (last column below).",
    "time": "Near-orthogonal keys with 16 that stand out, in 64 dimensions. Only the preparation reads all keys.",
}


def report_page(found: dict[str, Any], pictures: dict[str, bytes]) -> str:
    """The report as one HTML page that needs nothing else."""
    figures = "".join(shown(png, CAPTIONS[name].split(".")[0], CAPTIONS[name]) for name, png in pictures.items())
    return page(
        "The planted model, measured",
        f"{summary_table(summary(found))}{figures}"
        "<h2>Every setting</h2>\n<p>Grey rows: the assumptions do not hold, so no query of the model exists.</p>\n"
        f"{settings_table(found['settings'])}<h2>Time</h2>\n{time_table(found['scaling'])}",
    )


def settings_table(rows: list[Row]) -> str:
    """One line for each setting of the block Gaussian."""
    head = ["n", "k", "ε1", "|S|", "δ1", "4/k", "√(2 ln(|S|²/2)/k)", "δ2", "4ε1/k", "ρ", "largest |S(q)|", "|U|/n"]
    head += ["|U′|/n", "S in U′", "recovered", "false keys", "S in U′, paper's δ", "recovered, paper's δ"]
    head += ["recovered, paper's δ1 and measured ρ"]
    lines = []
    for row in rows:
        values = [f"{row['n']:,}", row["k"], f"{row['eps1']:g}", row["size"]]
        values += [f"{row[name]:.4f}" for name in ("delta1", "delta1_paper", "delta1_expected", "delta2")]
        values += [f"{row['delta2_paper']:.2g}", f"{row['rho']:.4f}", row["max_relevant"]]
        values += [f"{row[name] / row['n']:.3%}" for name in ("universal", "candidates")]
        values += [percent(row["standout_kept"]), percent(row["recovered"])]
        values += ["–" if row["false_keys"] is None else row["false_keys"]]
        values += [percent(row["paper_standout_kept"]), percent(row["paper_recovered"])]
        values += [percent(row["paper_threshold_recovered"])]
        lines.append(("holds" if row["holds"] else "fails", values))
    return grid_table(head, lines)


def time_table(rows: list[Row]) -> str:
    """One line for each n at which times were taken."""
    head = ["n", "|U|", "|U′|", "check", "prepare", "query", "query in a batch", "scan", "recovered", "false keys"]
    lines = []
    for row in rows:
        values = [f"{row['n']:,}", row["universal"], row["candidates"]]
        values += [seconds(row[f"{name}_seconds"]) for name in ("check", "recover", "query", "batch", "scan")]
        values += [percent(row["recovered"]), row["false_keys"]]
        lines.append(("time", values))
    return grid_table(head, lines)
