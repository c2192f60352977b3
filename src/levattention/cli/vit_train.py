"""`levattention vit train`: a vision transformer from scratch, by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from levattention.cli.app import notices, require_extra, screen
from levattention.cli.vit import vit


@vit.command()
def train(
    recipe: Annotated[str, typer.Argument(help="FILE.py:function, a function that gives a Recipe.")],
    data: Annotated[Path, typer.Option(help="Images with train and test splits.")],
    out: Annotated[Path, typer.Option(help="Folder of the run: metrics, checkpoint, model.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out, if any.")] = False,
    change: Annotated[list[str] | None, typer.Option("--set", help="NAME=VALUE of the recipe; repeat.")] = None,
    count: Annotated[int | None, typer.Option(help="Train on the first so many images only.")] = None,
    test_count: Annotated[int | None, typer.Option(help="Test on the first so many images only.")] = None,
    skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave out images that cannot be read.")] = False,
    check: Annotated[bool, typer.Option(help="Read every image file once before the first step.")] = True,
    workers: Annotated[int, typer.Option(help="Processes that read image files.")] = 0,
    cpu: Annotated[bool, typer.Option("--cpu", help="Stay off the GPU.")] = False,
) -> None:
    """Train a vision transformer by RECIPE: full attention first, then the keys it selects."""
    require_extra("vit", "transformers", "accelerate", "PIL")
    from levattention.vision.data import open_images
    from levattention.vision.recipe import load_recipe
    from levattention.vision.train import train as run

    if wrong := [text for text in change or [] if "=" not in text]:
        raise ValueError(f"--set: expected NAME=VALUE, got {wrong[0]!r}")
    chosen = load_recipe(recipe, dict(text.split("=", 1) for text in change or []))
    options: dict[str, Any] = {"skip_bad": skip_bad, "check": check}
    with notices.status("reading the images"):
        training = open_images(data, split="train", count=count, **options)
        test = open_images(data, split="test", count=test_count, **options)
    for images in (training, test):
        if images.skipped:
            notices.print(f"{images.name}: {len(images.skipped)} unreadable images left out", style="yellow")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notices, transient=True) as progress:
        task = progress.add_task("train", total=None)

        def tell(line: dict[str, Any]) -> None:
            if "loss" in line:
                text = f"epoch {line['epoch']:.2f}, loss {line['loss']:.3f}, {line['attention']}"
                progress.update(task, total=line["steps"], completed=line["step"], description=text)
            if "top1" in line:
                notices.print(f"epoch {line['epoch']:.2f}: {100 * line['top1']:.2f} % of {len(test)} test images")

        last = run(chosen, training, test, out, resume=resume, cpu=cpu, workers=workers, tell=tell)
    from accelerate import PartialState

    if not PartialState().is_main_process:
        return
    if "top1" in last:
        low, high = (100 * end for end in last["top1_interval"])
        screen.print(f"{100 * last['top1']:.2f} % of {test.name} ({low:.2f} to {high:.2f} with 95 % confidence)")
    screen.print(f"written to {out}")
