"""`levattention vit`: the paper's experiments on vision transformers."""

from __future__ import annotations

import typer

from levattention.cli.app import app

vit = typer.Typer(
    help="The paper's experiments on vision transformers, on your model and images.", no_args_is_help=True
)
app.add_typer(vit, name="vit")
