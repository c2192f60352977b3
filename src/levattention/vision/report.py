"""The vision part of the demo's report: how models attend, and what is left of them at k keys a head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from torch import Tensor

from levattention.pages import grid_table, photo, picture, shown, summary_table
from levattention.vision import figures
from levattention.vision.evaluate import FULL, Row, evaluate
from levattention.vision.images import ImageSet
from levattention.vision.preprocess import Preprocess
from levattention.vision.results import named, percent, summary
from levattention.vision.selectors import TITLES
from levattention.vision.structure import KINDS, Structure, structure

EXAMPLES = 4


@dataclass(frozen=True)
class Looked:
    """A model, measured.

    Attributes:
        name: what it is, for headings: "trained with softmax".
        top_k: the budget of every selector.
        rows: the inference table.
        structure: of its attention, as it was trained.
        images: the first images as it sees them, uint8 (c, h, w).
    """

    name: str
    top_k: int
    rows: list[Row]
    structure: Structure
    images: list[Tensor]

    def row(self, method: str) -> Row:
        """The row of a selector."""
        return next(row for row in self.rows if row["method"] == method)


def look(
    name: str,
    model: Any,
    preprocess: Preprocess,
    images: ImageSet,
    looked_at: ImageSet,
    *,
    top_k: int,
    selectors: Sequence[str] = tuple(TITLES),
    radius: int = 3,
    batch: int = 50,
    advance: Callable[[int], None] = lambda count: None,
) -> Looked:
    """Structure over the images `looked_at`, then every selector at the budget over `images`.

    The structure is that of the attention in force; afterwards the model has full attention.
    """
    found = structure(model, looked_at, preprocess, top=top_k, radius=radius, examples=EXAMPLES, advance=advance)
    rows = list(
        evaluate(
            model, images, preprocess, selectors=selectors, budgets=[top_k], batch=batch, radius=radius, advance=advance
        )
    )
    pictures = preprocess.collate([looked_at[i] for i in range(len(found.examples[0]))])[0]
    return Looked(name, top_k, rows, found, list(pictures))


def passes(selectors: Sequence[str], count: int, looked_at: int) -> int:
    """How many images `look` sees, which is what it tells `advance`."""
    return looked_at + (1 + len(selectors)) * count


def cards(models: Sequence[Looked]) -> str:
    """The figures that matter most, large: each model's accuracy as it is and at k keys a head."""
    shares = []
    for model in models:
        for method, told in ((FULL, "every key seen"), ("leverage", f"{model.top_k} keys of largest leverage")):
            shares.append((percent(model.row(method)["top1"]), f"{model.name}, {told}"))
    boxes = "".join(f"<div><b>{share} %</b>{escape(told)}</div>" for share, told in shares)
    return f'<div class="cards">{boxes}</div>\n'


def accuracy_section(models: Sequence[Looked]) -> str:
    """The inference table of all models, and its bars."""
    count, top_k = models[0].rows[0]["images"], models[0].top_k
    head = ["keys a query sees"]
    for model in models:
        head += [f"{model.name}: top-1, %", "95 % interval", "as with all keys, %"]
    lines = []
    for method in (row["method"] for row in models[0].rows):
        values = [named(models[0].row(method))]
        for model in models:
            row = model.row(method)
            values += [percent(row["top1"]), "–".join(percent(x) for x in row["top1_interval"]), percent(row["agree"])]
        lines.append(("full" if method == FULL else "", values))
    ends = [f"<li>{escape(best_and_worst(model))}</li>" for model in models]
    bars = figures.draw_bars([(model.name, model.rows) for model in models])
    alt = " ".join(best_and_worst(model) for model in models)
    return (
        f"<h2>Accuracy with {top_k} keys a head</h2>\n"
        f"<p>Both models on the same {count} test images, without further training. Every query sees only {top_k} of "
        f"{models[0].structure.layout.tokens} keys, chosen anew for each image and head; “local” adds the patches "
        "within Manhattan distance 3, and clusters spend the same budget on slots that stand for several keys. "
        f"</p>\n<ul>{''.join(ends)}</ul>\n{grid_table(head, lines)}"
        + shown(
            picture(bars),
            f"Bars of top-1 accuracy. {alt}",
            f"Top-1 accuracy on {count} images; whiskers are 95 % Wilson intervals. Selectors are compared on the same "
            "images, so that a difference between two of them is surer than their intervals suggest.",
        )
    )


def best_and_worst(model: Looked) -> str:
    """What the table says of a model, in a sentence."""
    *_, best = ordered = sorted((row for row in model.rows if row["method"] != FULL), key=lambda row: row["top1"])
    told = [f"{named(row)} ({percent(row['top1'])})" for row in (best, ordered[0])]
    return (
        f"{model.name[0].upper()}{model.name[1:]}: {percent(model.row(FULL)['top1'])} % of images right with all keys; "
        f"of the selectors, most with {told[0]} and fewest with {told[1]}."
    )


def structure_section(models: Sequence[Looked]) -> str:
    """The paper's figures: neighbourhood, histograms, W_j and universal keys, for the first model in full."""
    first = models[0]
    found = first.structure
    place, count = found.layout, found.histograms.shape[-2]
    parts = [
        "<h2>What the heads look at</h2>\n",
        f"<p>The measurements of the paper’s appendix on the model {escape(first.name)}, over {count} images: "
        f"{place.depth} layers of {place.heads} heads, {place.tokens} tokens (a class token and {place.h} × {place.w} "
        "patches).</p>\n",
        summary_table(summary(found)),
    ]
    near = shown(
        photo(figures.draw_neighbourhood(first.images[0], place, found.radius)),
        "A test image cut into patches; one patch is red, the diamond of patches around it green",
        f"An image cut into {place.h} × {place.w} patches. Local to the red patch are the green ones, within Manhattan "
        f"distance {found.radius}.",
        size="small",
    )
    captions = {
        "top": f"Top-heaviness: how much of a query’s attention its {found.top} largest weights hold.",
        "local": f"Locality: how much lies within Manhattan distance {found.radius} of the query’s patch.",
        "covered": f"The {found.top} important keys of a head (of the largest W_j) and the local ones together.",
    }
    drawn = {
        kind: shown(
            picture(figures.draw_histograms(found, kind), dpi=140),
            f"Grid of histograms, a row for each layer and a column for each head: {captions[kind]}",
            f"{captions[kind]} A histogram for each layer and head, over all queries of {count} images; the number is "
            f"its mean. Dotted: equal weights would give {float(found.uniform[i]):.2f}.",
            size="scroll",
        )
        for i, kind in enumerate(KINDS)
    }
    parts += [near, *drawn.values()]
    parts += [
        shown(
            picture(figures.draw_maps(found.nonlocal_mass, place, "W_j, mean"), dpi=140),
            "Grid of heat maps of W_j over the patches, a row for each layer and a column for each head",
            "W_j, the attention that a key receives from queries that are not local to it: lighter is more, each map "
            f"on its own scale. Mean of {count} images; printed above, the class token’s.",
            size="scroll",
        )
    ]
    parts += ["<h2>The universal keys, on the images</h2>\n"]
    parts += [
        shown(
            photo(figures.draw_universal(model.images, model.structure)),
            f"Test images, and beside each its layers with the universal keys of the model {model.name} framed",
            f"Model {model.name}. Framed: patches whose key is among the {model.structure.top} of largest leverage in "
            "some head of the layer; the lighter, the more heads. "
            f"Of {model.structure.top} important keys, {float(model.structure.overlap.mean()):.1f} are among them on "
            f"average (by chance {model.structure.top**2 / place.tokens:.1f}).",
            size="scroll",
        )
        for model in models
    ]
    return "".join(parts)
