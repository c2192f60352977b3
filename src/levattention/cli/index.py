"""`levattention index`: keys on disk -> an index that answers queries."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from levattention.cli.app import app, reading, require_suffix, screen, telling
from levattention.heavy import HeavyIndex
from levattention.losses import Huber, Loss, Power, Tukey
from levattention.normaliser import Normaliser, Sampled
from levattention.sources import open_keys


@app.command()
def index(
    file: Annotated[Path, typer.Argument(help="Keys (n, d) or (heads, n, d): .npy or .safetensors.")],
    eps: Annotated[float, typer.Option(help="Queries will return every key of at least this weight.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Write the index to this .lev file.")],
    p: Annotated[float | None, typer.Option("--p", help="f(x) = |x|^p; 2 where nothing else is given.")] = None,
    huber: Annotated[float | None, typer.Option(help="Huber's loss with this threshold instead.")] = None,
    tukey: Annotated[float | None, typer.Option(help="Tukey's loss with this threshold instead.")] = None,
    delta: Annotated[float | None, typer.Option(help="Sample the normaliser, within 1 ± delta.")] = None,
    failure: Annotated[float, typer.Option(help="Probability that a sample fails a query.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of the sample.")] = 0,
    tensor: Annotated[str | None, typer.Option(help="Which tensor of a .safetensors file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Build an index of the keys in FILE that answers `levattention query` in time independent of their number."""
    require_suffix(out, ".lev")
    loss = chosen_loss(p, huber, tukey)
    normaliser: Normaliser | None = None if delta is None else Sampled(delta, failure, seed)
    keys = open_keys(file, tensor)
    started = time.perf_counter()
    # f = x² reads the keys for the Gram, for the scores and for R.
    with telling(), reading(str(file), keys, passes=3) as advance:
        built = HeavyIndex(keys, eps, loss, normaliser, advance=advance)
    built.save(out)
    stats = built.stats() | {"seconds": round(time.perf_counter() - started, 3), "file bytes": out.stat().st_size}
    if as_json:
        print(json.dumps(stats))
        return
    screen.print(table_of(stats))
    screen.print(f"written to {out}")


def chosen_loss(p: float | None, huber: float | None, tukey: float | None) -> Loss:
    """The loss that the options name."""
    given: list[Loss] = []
    if p is not None:
        given.append(Power(int(p) if p == int(p) else p))
    if huber is not None:
        given.append(Huber(huber))
    if tukey is not None:
        given.append(Tukey(tukey))
    if len(given) > 1:
        raise ValueError("give at most one of --p, --huber and --tukey")
    return given[0] if given else Power(2)


def table_of(stats: dict[str, Any]) -> Table:
    """What a person wants to know of an index."""
    table = Table(title="Index of heavy keys", show_header=False)
    for name, value in stats.items():
        if value != []:
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    return table
