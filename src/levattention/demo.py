"""`levattention demo`: the universal set attacked, two vision transformers measured, and one page that shows it all."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from levattention.pages import page, picture, shown, summary_table, write
from levattention.report import Planted, draw_scores, run_planted_keys
from levattention.vision.images import ImageSet
from levattention.vision.preprocess import Preprocess
from levattention.vision.report import Looked, accuracy_section, cards, look, passes, structure_section
from levattention.vision.selectors import TITLES

# name, model with the attention it was trained with, preprocess
Trained = tuple[str, Any, Preprocess]


def run_demo(
    out: Path,
    screen: Console,
    notices: Console,
    models: Sequence[Trained],
    images: ImageSet,
    *,
    looked_at: int = 64,
    top_k: int = 32,
    selectors: Sequence[str] = tuple(TITLES),
) -> None:
    """Attack a universal set, measure the models, print the tables, and write report.html and its first picture."""
    from levattention.vision.results import accuracy_table

    started = time.perf_counter()
    out.mkdir(parents=True, exist_ok=True)
    planted = run_planted_keys(screen, notices)
    curve = picture(draw_scores(planted))
    write(out / "universal_set.png", curve)
    found = measure(models, images, notices, looked_at=looked_at, top_k=top_k, selectors=selectors)
    for model in found:
        screen.print(accuracy_table(model.rows, f"Model {model.name}, {len(images)} images, per cent"))
    with notices.status("drawing the report"):
        seconds = time.perf_counter() - started
        content = report_page(planted, curve, found, images, seconds).encode()
    write(out / "report.html", content)
    screen.print(f"Picture: {out / 'universal_set.png'}", soft_wrap=True)
    screen.print(f"Report: {out / 'report.html'} ({len(content) / 1e6:.1f} MB)", soft_wrap=True)


def measure(
    models: Sequence[Trained],
    images: ImageSet,
    notices: Console,
    *,
    looked_at: int,
    top_k: int,
    selectors: Sequence[str],
) -> list[Looked]:
    """Every model, measured: as many at a time as there are cores, each on one of them."""
    first = First(images, looked_at)
    total = passes(selectors, len(images), len(first))
    threads = torch.get_num_threads()
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=notices, transient=True) as progress, ThreadPoolExecutor(max(1, threads)) as pool:

        def one(trained: Trained, advance: Callable[[int], None]) -> Looked:
            # Operations this small run better side by side, a core each, than split over all cores.
            torch.set_num_threads(1)
            name, model, preprocess = trained
            return look(name, model, preprocess, images, first, top_k=top_k, selectors=selectors, advance=advance)

        waiting = []
        for trained in models:
            task = progress.add_task(f"model {trained[0]}", total=total)
            waiting.append(pool.submit(one, trained, partial(progress.advance, task)))
        found = [future.result() for future in waiting]
    torch.set_num_threads(threads)
    return found


class First(ImageSet):
    """The first images of a set."""

    def __init__(self, images: ImageSet, count: int) -> None:
        super().__init__(images.name, images.labels[:count], images.classes)
        self.images = images

    def image(self, index: int) -> torch.Tensor:
        """Uint8 (c, h, w)."""
        return self.images.image(index)


def report_page(planted: Planted, curve: bytes, models: Sequence[Looked], images: ImageSet, seconds: float) -> str:
    """The report as one HTML page."""
    n, d = planted.keys.shape
    body = (
        cards(models)
        + "<h2>A small set holds every key that can be heavy</h2>\n"
        + f"<p>{n:,} keys in {d} dimensions, a few of them planted to stand out. For f(x) = x² the universal set U "
        f"holds every key that some query can give a weight of at least ε = {planted.eps}, and no query can do so to a "
        "key outside. A gradient search over queries tried to break it.</p>\n"
        + summary_table(planted.lines())
        + f"<p>{planted.verdict()}</p>\n"
        + shown(
            curve,
            f"Leverage scores in falling order on logarithmic axes; {planted.size} of {n:,} keys lie above ε",
            "Every key’s largest possible weight (its leverage score), best first. Green: the keys of U, above ε; "
            "dotted: the size that the theorem allows.",
        )
        + accuracy_section(models)
        + structure_section(models)
        + "<h2>On your own model and images</h2>\n"
        "<p><code>levattention vit eval --model M --data D</code> gives the table, "
        "<code>levattention vit structure --model M --data D</code> the pictures, and "
        "<code>levattention find keys.npy --eps 0.01</code> the universal set of any keys.</p>\n"
        + f"<footer>{len(images)} images of {images.name}; seed 0; measured in {seconds:.0f} s on "
        f"{torch.get_num_threads()} threads; torch {torch.__version__}.</footer>\n"
    )
    return page(
        "LevAttention: the keys that can ever matter",
        body,
        "Most keys of an attention layer can never receive a large weight, whatever the query. These are the few that "
        "can, and what two small vision transformers do with them alone.",
    )
