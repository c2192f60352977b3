"""`levattention demo`: the main job, shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from levattention.cli.app import app, notices, require_extra, screen


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.html and its first picture.")] = Path("demo-out"),
    images: Annotated[int, typer.Option(min=1, help="Test images that every selector is measured on.")] = 200,
) -> None:
    """Attack a universal set, measure two small vision transformers under every selector, and write one HTML report."""
    require_extra("vit", "transformers", "matplotlib", "PIL")
    from levattention.demo import run_demo
    from levattention.vision.embedded import embedded_images, embedded_models

    models = [(f"trained with {name}", model, preprocess) for name, model, preprocess in embedded_models()]
    run_demo(out, screen, notices, models, embedded_images(images))
