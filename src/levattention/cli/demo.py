"""`levattention demo`: the main job, shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from levattention.cli.app import app, notices, screen


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-out"),
) -> None:
    """Plant heavy keys, find the universal set, attack it with a query search, draw a picture."""
    from levattention.report import run_demo

    run_demo(out, screen, notices)
