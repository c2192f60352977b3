"""`levattention vit structure` and `levattention vit eval`: a trained model, looked at and measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from levattention.cli.app import notices, require_extra, screen
from levattention.cli.vit import vit

EXTRAS = ("transformers", "matplotlib", "PIL")

Model = Annotated[
    str | None,
    typer.Option(
        help="A Hugging Face id or folder, a timm-named .safetensors file, or a checkpoint of ours. By default the "
        "small one trained with softmax that comes with the package, and its images."
    ),
]
Data = Annotated[
    Path | None, typer.Option(help="Class folders, a folder with labels.csv, CIFAR-10 sheets, or idx files.")
]
Split = Annotated[str, typer.Option(help="Which images, where the data has train and test.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out image files that cannot be read.")]
Radius = Annotated[int, typer.Option(min=0, help="Manhattan distance of local patches.")]
Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda.")]


@contextmanager
def looking(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A progress bar over images, on stderr, gone when done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notices, transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda count: progress.advance(task, count)


def opened(
    model: str | None, data: Path | None, split: str, count: int | None, skip_bad: bool, device: str
) -> tuple[Any, Any, Any]:
    """(model, preprocess, images), with a word on what was left out."""
    from levattention.vision.data import open_images
    from levattention.vision.embedded import embedded_images, embedded_models
    from levattention.vision.models import load_vit

    if model is not None and data is None:
        raise ValueError("--data: expected images for this --model")
    net, preprocess = embedded_models()[0][1:] if model is None else load_vit(model)
    try:
        net.to(torch.device(device))
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device: expected one that is there, such as cpu, got {device!r} ({error})") from None
    images = embedded_images(count) if data is None else open_images(data, split=split, count=count, skip_bad=skip_bad)
    if images.skipped:
        named = ", ".join(images.skipped)
        notices.print(f"{len(images.skipped)} images cannot be read and are left out: {named}", markup=False)
    return net, preprocess, images


def described(model: str | None, images: Any) -> dict[str, Any]:
    """What was measured, without where it lies on this machine."""
    path = Path(model or "")
    name = path.stem if path.is_file() else path.name if path.is_dir() else model
    return {
        "model": "embedded, softmax" if model is None else name,
        "data": images.name,
        "images": len(images),
        "skipped": len(images.skipped),
    }


@vit.command()
def structure(
    model: Model = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for structure.json and the pictures.")] = Path("structure-out"),
    split: Split = "test",
    images: Annotated[int, typer.Option(min=1, help="How many images.")] = 16,
    top: Annotated[
        int, typer.Option(min=1, help="Largest weights, important keys, and keys of largest leverage.")
    ] = 32,
    radius: Radius = 3,
    batch: Annotated[int, typer.Option(min=1, help="Images in a forward pass.")] = 5,
    device: Device = "cpu",
    skip_bad: SkipBad = False,
) -> None:
    """Measure attention as the paper's appendix does: top weights, local weights, important keys, W_j, head by head."""
    require_extra("vit", *EXTRAS)
    from levattention.vision.results import save_structure, summary
    from levattention.vision.structure import structure as measure

    net, preprocess, found = opened(model, data, split, images, skip_bad, device)
    with looking("attention, images seen", len(found)) as advance:
        measured = measure(
            net, found, preprocess, top=top, radius=radius, batch=batch, examples=min(4, len(found)), advance=advance
        )
    pictures = preprocess.collate([found[i] for i in range(len(measured.examples[0]))])[0]
    save_structure(out, described(model, found), measured, list(pictures))
    table = Table(title=f"Structure of attention, {len(found)} images", show_header=False)
    for line in summary(measured):
        table.add_row(*line)
    screen.print(table)
    screen.print(f"Numbers and pictures: {out}", soft_wrap=True)


@vit.command("eval")
def evaluate(
    model: Model = None,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for eval.json, eval.md and eval.png.")] = Path("eval-out"),
    split: Split = "test",
    images: Annotated[int | None, typer.Option(min=1, help="How many images; all by default.")] = None,
    top_k: Annotated[list[int] | None, typer.Option("--top-k", min=1, help="Keys a head; repeat for more.")] = None,
    selector: Annotated[list[str] | None, typer.Option(help="How keys are chosen; repeat for more.")] = None,
    radius: Radius = 3,
    batch: Annotated[int, typer.Option(min=1, help="Images in a forward pass.")] = 25,
    seed: Annotated[int, typer.Option(min=0, help="Of the selectors that draw.")] = 0,
    device: Device = "cpu",
    skip_bad: SkipBad = False,
    resume: Annotated[bool, typer.Option("--resume", help="Keep the rows that --out has already.")] = False,
) -> None:
    """Accuracy when every query sees k keys a head, for each way of choosing them, without training."""
    require_extra("vit", *EXTRAS)
    from levattention.vision import evaluate as evaluation
    from levattention.vision.results import accuracy_table, fingerprint, load_evaluation, save_evaluation, save_plot
    from levattention.vision.selectors import TITLES

    selectors, budgets = list(dict.fromkeys(selector or TITLES)), sorted(set(top_k or [8, 16, 32, 64, 128]))
    evaluation.require(selectors, budgets, batch)
    net, preprocess, found = opened(model, data, split, images, skip_bad, device)
    settings = {**described(model, found), "fingerprint": fingerprint(net, found), "radius": radius, "seed": seed}
    machine = {"device": device, "threads": torch.get_num_threads()}
    done = load_evaluation(out, settings) if resume else []
    rows = []
    with looking("inference, images seen", len(found) * (1 + len(selectors) * len(budgets))) as advance:
        table = evaluation.evaluate(
            net,
            found,
            preprocess,
            selectors=selectors,
            budgets=budgets,
            batch=batch,
            radius=radius,
            seed=seed,
            done=done,
            advance=advance,
        )
        for row in table:
            rows.append(row)
            # Rows of an earlier run that have not come up yet, or were not asked for, stay.
            mine = {(row["method"], row["top_k"]) for row in rows}
            others = [row for row in done if (row["method"], row["top_k"]) not in mine]
            save_evaluation(out, settings, rows + others, machine)
    save_plot(out, rows, f"{settings['model']}, {len(found)} images")
    screen.print(accuracy_table(rows, f"{settings['model']}, {len(found)} images, per cent"))
    screen.print(f"Table, numbers and plot: {out}", soft_wrap=True)
