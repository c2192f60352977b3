"""Pictures of the vision experiments: grids of layers × heads, images with keys marked, the table as a plot."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from levattention.pages import canvas
from levattention.vision.evaluate import FULL, Row
from levattention.vision.layout import Layout
from levattention.vision.selectors import title
from levattention.vision.structure import COARSE, KINDS, Structure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, RED, GREEN = "#1b4f8f", "#d1495b", "#2e933c"
STYLES = {
    "leverage": (INK, "o-"),
    "norm": ("#8d99ae", "s-"),
    "random": ("#6b705c", "^-"),
    "local": (GREEN, "D-"),
    "sample": ("#f4a261", "v-"),
    "cluster": (RED, "o-"),
    "cluster-keys": (RED, "o--"),
}
LEWIS_COLOURS = ("#7b2cbf", "#c77dff", "#480ca8", "#4cc9f0")


def titles(found: Structure) -> dict[str, str]:
    """What each histogram shows, as people read it."""
    return {
        "top": f"Mass of each query's {found.top} largest weights",
        "local": f"Mass within Manhattan distance {found.radius}",
        "covered": f"Mass of the {found.top} important keys and the local ones",
    }


def panels(
    rows: int, columns: int, panel: tuple[float, float], gap: float, left: float, top: float
) -> tuple[Figure, Any]:
    """A figure of equal panels, sized in inches, and its axes.

    Laid out by hand: matplotlib's own layout of a hundred panels takes as long as all else together.
    """
    from matplotlib.figure import Figure

    right, bottom = 0.1, 0.3
    wide, high = columns * panel[0] + left + right, rows * panel[1] + top + bottom
    figure = Figure(figsize=(wide, high))
    axes = figure.subplots(
        rows,
        columns,
        squeeze=False,
        gridspec_kw={
            "left": left / wide,
            "right": 1 - right / wide,
            "bottom": bottom / high,
            "top": 1 - top / high,
            # In shares of the panels' own size.
            "wspace": 0.1 / (panel[0] - 0.1),
            "hspace": gap / (panel[1] - gap),
        },
    )
    return figure, axes


def grid_of_heads(
    depth: int, heads: int, panel: tuple[float, float], gap: float, heading: str, turned: bool = False
) -> tuple[Figure, Any]:
    """A figure with a panel for each head, a row for each layer (a column if turned), and its axes [layer, head]."""
    rows, columns = (heads, depth) if turned else (depth, heads)
    figure, axes = panels(rows, columns, panel, gap, left=0.4, top=0.42 + 1.1 * gap)
    figure.suptitle(
        heading, fontsize=9.5, x=0.4 / figure.get_figwidth(), y=1 - 0.08 / figure.get_figheight(), ha="left"
    )
    for row in range(rows):
        axes[row, 0].set_ylabel(f"head {row + 1}" if turned else f"layer {row + 1}", fontsize=8)
    for column in range(columns):
        axes[0, column].set_title(f"layer {column + 1}" if turned else f"head {column + 1}", fontsize=8)
    return figure, axes.T if turned else axes


def draw_histograms(found: Structure, kind: str) -> Figure:
    """The distribution of one mass over queries, a panel for each layer and head, as in the paper's appendix."""
    place, which = found.layout, KINDS.index(kind)
    shares, means = found.coarse()[which].numpy(), found.means[which].numpy()
    panel, heading = (max(0.95, 6.6 / place.heads), 0.72), f"{titles(found)[kind]}; printed: its mean"
    figure, axes = grid_of_heads(place.depth, place.heads, panel, 0.1, heading)
    edges = [i / COARSE for i in range(COARSE)]
    for layer in range(place.depth):
        for head in range(place.heads):
            one = axes[layer, head]
            one.bar(edges, shares[layer, head], width=1 / COARSE, align="edge", color=INK, linewidth=0)
            one.axvline(float(found.uniform[which]), color=RED, linestyle=":", linewidth=1)
            one.set(xlim=(0, 1), yticks=[])
            one.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
            one.tick_params(labelsize=7, length=2, labelbottom=layer == place.depth - 1)
            one.spines[["top", "right", "left"]].set_visible(False)
            # Room above the bars for the number.
            one.set_ylim(0, 1.35 * shares[layer, head].max())
            one.text(
                0.98, 0.98, f"{means[layer, head]:.2f}", transform=one.transAxes, ha="right", va="top", fontsize=7.5
            )
    return figure


def draw_maps(maps: Tensor, place: Layout, heading: str) -> Figure:
    """A map of the patches for each layer and head, (L, H, n); printed above each, the value of the class token."""
    turned = place.depth > 2 * place.heads
    wide = max(0.8, 7.0 / (place.depth if turned else place.heads))
    panel = (wide, (wide - 0.1) * place.h / place.w + 0.22)
    figure, axes = grid_of_heads(place.depth, place.heads, panel, 0.22, heading, turned)
    for layer in range(place.depth):
        for head in range(place.heads):
            one, values = axes[layer, head], maps[layer, head].numpy()
            one.imshow(values[place.prefix :].reshape(place.h, place.w), cmap="magma", vmin=0, interpolation="nearest")
            one.set(xticks=[], yticks=[])
            one.spines[:].set_visible(False)
            if place.prefix:
                above = one.get_title()
                one.set_title(f"{above}\nclass {float(values[0]):.3g}".strip(), fontsize=7, pad=2)
    return figure


def draw_neighbourhood(image: Tensor, place: Layout, radius: int) -> Figure:
    """The image cut into patches, one patch red and its neighbours green."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    figure = Figure(figsize=(4.2, 4.2 * place.h / place.w), layout="constrained")
    axes = figure.subplots()
    show_image(axes, image, place)
    row, column = place.h // 2 - 1, place.w // 2 - 1
    centre = place.prefix + row * place.w + column
    near = place.grid(radius).near(torch.tensor([centre]), torch.arange(place.tokens))[0]
    for token in near[place.prefix :].nonzero().squeeze(-1).tolist():
        y, x = divmod(token, place.w)
        colour = RED if token + place.prefix == centre else GREEN
        axes.add_patch(Rectangle((x, y), 1, 1, color=colour, alpha=0.6, linewidth=0))
    for line in range(1, place.w):
        axes.axvline(line, color="white", linewidth=0.7)
    for line in range(1, place.h):
        axes.axhline(line, color="white", linewidth=0.7)
    return figure


def draw_universal(images: Sequence[Tensor], found: Structure, layers: Iterable[int] | None = None) -> Figure:
    """Images with their universal keys: the lighter a patch, the more heads of the layer have it in U."""
    place, universal = found.layout, found.examples[1].double()
    chosen = list(spread_over(place.depth) if layers is None else layers)
    columns = 1 + len(chosen)
    panel = (1.45, 1.35 * place.h / place.w + 0.1)
    figure, axes = panels(len(images), columns, panel, 0.1, left=0.1, top=0.3)
    for row, image in enumerate(images):
        show_image(axes[row, 0], image, place)
        for column, layer in enumerate(chosen, 1):
            share = universal[row, layer].mean(0)[place.prefix :].reshape(place.h, place.w)
            show_image(axes[row, column], image, place, dim=0.25 + 0.75 * share)
            outline(axes[row, column], share > 0)
    axes[0, 0].set_title("image", fontsize=9)
    for column, layer in enumerate(chosen, 1):
        axes[0, column].set_title(f"layer {layer + 1}", fontsize=9)
    return figure


def spread_over(depth: int, count: int = 6) -> list[int]:
    """At most `count` layers from the first to the last."""
    return sorted({round(i * (depth - 1) / max(1, count - 1)) for i in range(count)})


def show_image(axes: Any, image: Tensor, place: Layout, dim: Tensor | None = None) -> None:
    """A uint8 image (c, h, w), one unit a patch; darkened patch by patch where `dim` is given."""
    shown = image.double() / 255
    if dim is not None:
        high, wide = shown.shape[-2] // place.h, shown.shape[-1] // place.w
        shown = shown * dim.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    single = shown.shape[0] == 1
    axes.imshow(
        (shown[0] if single else shown.movedim(0, -1)).numpy(),
        cmap="gray" if single else None,
        vmin=0,
        vmax=1,
        extent=(0, place.w, place.h, 0),
    )
    axes.set(xticks=[], yticks=[], xlim=(0, place.w), ylim=(place.h, 0))
    axes.spines[:].set_visible(False)


def outline(axes: Any, marked: Tensor) -> None:
    """A thin frame around every patch that is marked."""
    from matplotlib.collections import LineCollection

    corners = marked.nonzero().tolist()
    squares = [[(x, y), (x + 1, y), (x + 1, y + 1), (x, y + 1), (x, y)] for y, x in corners]
    axes.add_collection(LineCollection(squares, colors="#ffd166", linewidths=0.5))


def draw_accuracy(rows: Sequence[Row], heading: str) -> Figure:
    """Top-1 accuracy against the budget, a line for each selector, with its 95 % interval."""
    figure, (axes,) = canvas(width=8.0, height=4.8)
    full = next(row for row in rows if row["method"] == FULL)
    axes.axhspan(*(100 * x for x in full["top1_interval"]), color="gray", alpha=0.15, linewidth=0)
    axes.axhline(100 * full["top1"], color="black", linestyle="--", label="full attention")
    spare = iter(LEWIS_COLOURS)
    for method in dict.fromkeys(row["method"] for row in rows if row["method"] != FULL):
        colour, style = STYLES.get(method) or (next(spare, "black"), "x-")
        points = sorted((row for row in rows if row["method"] == method), key=lambda row: row["top_k"])
        shares = [100 * row["top1"] for row in points]
        low, high = (
            [abs(100 * row["top1_interval"][i] - s) for row, s in zip(points, shares, strict=True)] for i in (0, 1)
        )
        axes.errorbar(
            [row["top_k"] for row in points],
            shares,
            yerr=[low, high],
            color=colour,
            fmt=style,
            capsize=3,
            markersize=5,
            label=title(method),
        )
    budgets = sorted({row["top_k"] for row in rows if row["method"] != FULL})
    axes.set_xscale("log")
    axes.set(xlabel="keys a head, k", ylabel="top-1 accuracy, %", ylim=(0, 100))
    axes.set_xticks(budgets, [str(k) for k in budgets])
    axes.minorticks_off()
    axes.set_title(heading, loc="left")
    figure.legend(loc="outside right upper", fontsize=9)
    return figure


def draw_bars(models: Sequence[tuple[str, Sequence[Row]]]) -> Figure:
    """Top-1 accuracy of each selector, a bar for each model, with its 95 % interval."""
    methods = [row["method"] for row in models[0][1]]
    figure, (axes,) = canvas(width=8.0, height=1.0 + 0.24 * len(methods) * (len(models) + 0.6))
    thick, colours = 0.8 / len(models), (INK, RED, GREEN)
    for i, (name, rows) in enumerate(models):
        shares = [100 * row["top1"] for row in rows]
        ends = [[100 * x for x in row["top1_interval"]] for row in rows]
        errors = [[share - low for share, (low, _) in zip(shares, ends, strict=True)]]
        errors += [[high - share for share, (_, high) in zip(shares, ends, strict=True)]]
        at = [place + (i - (len(models) - 1) / 2) * thick for place in range(len(methods))]
        axes.barh(at, shares, height=0.92 * thick, xerr=errors, capsize=2, color=colours[i], label=name, alpha=0.9)
    labels = ["all keys" if method == FULL else title(method) for method in methods]
    axes.set_yticks(range(len(methods)), labels)
    axes.set(xlabel="top-1 accuracy, %", xlim=(0, 100))
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    figure.legend(loc="outside upper left", ncols=len(models), frameon=False)
    return figure
