"""`levattention planted`: the model of section 4, swept."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from levattention.cli.app import app, notices, require_extra, screen


@app.command()
def planted(
    out: Annotated[Path, typer.Option(help="Folder for planted.html, its pictures and planted.json.")] = Path(
        "planted-out"
    ),
    n: Annotated[list[int] | None, typer.Option("--n", help="Number of keys; repeat for more.")] = None,
    k: Annotated[list[int] | None, typer.Option("--k", help="Dimension of V, at most d/4; repeat for more.")] = None,
    eps1: Annotated[list[float] | None, typer.Option(help="Squared length off V or V⊥; repeat for more.")] = None,
    d: Annotated[int | None, typer.Option("--d", help="Dimension of the keys.")] = None,
    standout: Annotated[int | None, typer.Option(help="How many keys stand out, at every n.")] = None,
    eps0: Annotated[float | None, typer.Option(help="Which share of the keys stands out, instead.")] = None,
    queries: Annotated[int | None, typer.Option(help="Queries for each setting.")] = None,
    scaling: Annotated[list[int] | None, typer.Option(help="Number of keys to take times at; repeat.")] = None,
    seed: Annotated[int, typer.Option(help="Of all randomness.")] = 0,
) -> None:
    """Sweep the planted model of section 4 and write a report: recovery, sizes, times, and where δ1 ≥ 4/k fails."""
    require_extra("report", "matplotlib")
    from levattention.planted.sweep import Sweep
    from levattention.planted_report import run_planted

    if standout is not None and eps0 is not None:
        raise ValueError("give at most one of --standout and --eps0")
    given = {"n": n, "k": k, "eps1": eps1, "d": d, "standout": standout, "eps0": eps0}
    given |= {"count": queries, "scaling": scaling, "seed": seed}
    chosen: dict[str, Any] = {
        name: tuple(v) if isinstance(v, list) else v for name, v in given.items() if v is not None
    }
    run_planted(Sweep(**chosen), out, screen, notices)
