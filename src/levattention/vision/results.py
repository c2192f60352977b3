"""Results of the vision experiments on disk: the inference table and the structure, as numbers and pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from levattention.pages import photo, picture, write
from levattention.vision.evaluate import FULL, Row
from levattention.vision.images import ImageSet
from levattention.vision.selectors import title
from levattention.vision.structure import KINDS, Structure

HEAD = ("keys", "k", "top-1", "95 %", "top-5", "95 %", "first half", "last half", "as full", "images/s")


def named(row: Row) -> str:
    """The method of a row, as people read it."""
    return "full attention" if row["method"] == FULL else title(row["method"])


def percent(share: float | None) -> str:
    """A share as a percentage to one place, without its sign."""
    return "–" if share is None else f"{100 * share:.1f}"


def entries(row: Row) -> list[str]:
    """A row as text, under HEAD."""
    between = ["–".join(percent(end) for end in row[f"{part}_interval"]) for part in ("top1", "top5")]
    return [
        named(row),
        str(row["top_k"] or "all"),
        percent(row["top1"]),
        between[0],
        percent(row["top5"]),
        between[1],
        *(percent(row[part]) for part in ("first", "last", "agree")),
        f"{row['images_per_second']:.3g}",
    ]


def terse(row: Row) -> list[str]:
    """A row as text that fits a terminal: method, k, top-1 with its interval, top-5, as full, images/s."""
    method, k, top1, between, top5, *_, agree, speed = entries(row)
    return [method, k, f"{top1} ({between})", top5, agree, speed]


def accuracy_table(rows: Sequence[Row], heading: str) -> Table:
    """The inference table for a terminal."""
    table = Table(title=heading)
    table.add_column("keys")
    for name in ("k", "top-1 (95 %)", "top-5", "as full", "images/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*terse(row))
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown; shares in per cent."""
    lines = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)], *map(entries, rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def save_evaluation(
    out: Path, settings: dict[str, Any], rows: Sequence[Row], machine: dict[str, Any] | None = None
) -> None:
    """eval.json and eval.md, each whole, so that an interrupted run leaves what it found."""
    out.mkdir(parents=True, exist_ok=True)
    held = {**settings, "machine": machine, "rows": list(rows)}
    write(out / "eval.json", json.dumps(held, indent=1, allow_nan=False).encode())
    write(out / "eval.md", markdown(rows).encode())


def fingerprint(model: Any, images: ImageSet) -> str:
    """Twelve digits that tell a model's weights and the images' labels from others of the same name."""
    held = hashlib.sha256()
    for name, value in model.state_dict().items():
        held.update(name.encode())
        held.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    held.update(images.labels.numpy().tobytes())
    return held.hexdigest()[:12]


def load_evaluation(out: Path, settings: dict[str, Any]) -> list[Row]:
    """The rows of an earlier run with the same settings; none where there was no run.

    Raises:
        ValueError: a run with other settings, or a file that is none.
    """
    path = out / "eval.json"
    if not path.is_file():
        return []
    try:
        held = json.loads(path.read_text())
        rows = held.pop("rows")
        # The same rows come out of another machine, only faster or slower.
        held.pop("machine")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ValueError(f"{path}: expected the results of an earlier run; leave --resume out to replace it") from None
    differ = sorted(name for name in {*held, *settings} if held.get(name) != settings.get(name))
    if differ:
        raise ValueError(
            f"{path}: made with another {' and '.join(differ)}; leave --resume out to replace it, or give another --out"
        )
    return rows


def save_plot(out: Path, rows: Sequence[Row], heading: str) -> None:
    """eval.png: accuracy against the budget."""
    from levattention.vision.figures import draw_accuracy

    write(out / "eval.png", picture(draw_accuracy(rows, heading)))


def structure_pictures(found: Structure, images: Sequence[Tensor]) -> Iterator[tuple[str, bytes]]:
    """The pictures of the structure by file name, one after another.

    Args:
        found: the structure.
        images: the first images as uint8 (c, h, w), as many as examples were kept.
    """
    from levattention.vision import figures

    for kind in KINDS:
        yield f"{kind}.png", picture(figures.draw_histograms(found, kind), dpi=110)
    count = found.histograms.shape[-2]
    yield (
        "nonlocal_mass.png",
        picture(figures.draw_maps(found.nonlocal_mass, found.layout, f"W_j, mean of {count} images"), dpi=110),
    )
    yield (
        "nonlocal_mass_example.png",
        picture(figures.draw_maps(found.examples[0][0], found.layout, "W_j, the first image"), dpi=110),
    )
    yield "neighbourhood.jpg", photo(figures.draw_neighbourhood(images[0], found.layout, found.radius))
    yield "universal.jpg", photo(figures.draw_universal(images, found))


def save_structure(out: Path, settings: dict[str, Any], found: Structure, images: Sequence[Tensor]) -> None:
    """structure.json and the pictures."""
    pictures = dict(structure_pictures(found, images))
    out.mkdir(parents=True, exist_ok=True)
    for name, content in pictures.items():
        write(out / name, content)
    write(out / "structure.json", json.dumps({**settings, **found.numbers()}, indent=1, allow_nan=False).encode())


def summary(found: Structure) -> list[tuple[str, str]]:
    """What the structure says, a line each."""
    place = found.layout
    total = place.depth * place.heads
    half, most = found.at_least(0.5), found.at_least(0.9)
    names = {
        "top": f"{found.top} largest weights",
        "local": f"within distance {found.radius}",
        "covered": f"{found.top} important keys + local",
    }
    lines = [("heads", f"{place.depth} layers × {place.heads}; {place.tokens} tokens")]
    for i, kind in enumerate(KINDS):
        mean = found.means[i]
        lines.append(
            (
                names[kind],
                f"mean mass {float(mean.mean()):.2f} (heads: {float(mean.min()):.2f} to {float(mean.max()):.2f}; "
                f"equal weights: {float(found.uniform[i]):.2f}); most queries hold ≥ ½ in "
                f"{int((half[i] > 0.5).sum())} of {total} heads, ≥ 0.9 in {int((most[i] > 0.5).sum())}",
            )
        )
    distances = found.distances()
    if distances["images"] is not None and distances["heads"] is not None:
        for i, kind in enumerate(KINDS):
            own, other = float(distances["images"][0][i].mean()), float(distances["heads"][0][i])
            lines.append(
                (f"… alike across images ({kind})", f"Wasserstein {own:.3f} between images, {other:.3f} between heads")
            )
    chance = found.top**2 / place.tokens
    lines.append(
        (
            f"important keys among the {found.top} of largest leverage",
            f"{float(found.overlap.mean()):.1f} of {found.top} (by chance {chance:.1f})",
        )
    )
    return lines
