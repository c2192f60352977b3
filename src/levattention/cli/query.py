"""`levattention query`: an index and queries on disk -> the heavy keys of each query."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.progress import track
from rich.table import Table

from levattention.cli.app import app, notices, require_suffix, screen, telling
from levattention.heavy import HeavyIndex, Hits, joined
from levattention.sources import open_keys, replacing

# Queries between two steps of the progress bar.
BLOCK = 4096


@app.command()
def query(
    file: Annotated[Path, typer.Argument(help="An index that `levattention index` wrote.")],
    queries: Annotated[Path, typer.Argument(help="Queries (m, d) or (heads, m, d): .npy or .safetensors.")],
    tensor: Annotated[str | None, typer.Option(help="Which tensor of a .safetensors file of queries.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Write index, weight, valid to this .npz.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    rows: Annotated[int, typer.Option(help="Queries that the table shows.")] = 10,
) -> None:
    """List every key of large weight for each query."""
    require_suffix(out, ".npz")
    built = HeavyIndex.load(file)
    asked = open_keys(queries, tensor)
    with telling():
        hits = answer(built, asked)
    if out is not None:
        with replacing(out) as temporary, temporary.open("wb") as target:
            arrays = {field.name: getattr(hits, field.name).numpy() for field in fields(hits)}
            np.savez(target, allow_pickle=False, **arrays)
    if as_json:
        print(json.dumps({"eps": built.eps, "normaliser": str(built.normaliser.guarantee), "hits": as_lists(hits)}))
        return
    screen.print(table_of(hits, rows))
    screen.print(
        f"{int(hits.valid.sum()):,} hits of {hits.undefined.numel():,} queries; Z {built.normaliser.guarantee}"
    )
    if out is not None:
        screen.print(f"written to {out}")


def answer(built: HeavyIndex, queries: torch.Tensor) -> Hits:
    """All hits, with a progress bar on stderr; one warning for all undefined queries."""
    built.check(queries)
    blocks = queries.split(BLOCK, -2)
    steps = track(blocks, "queries", console=notices, transient=True)
    return joined([built(block, quiet=True) for block in steps]).warned()


def as_lists(hits: Hits) -> list:
    """For each query, nested as the batch is, its hits as {"key", "weight"}."""

    def nest(index: torch.Tensor, weight: torch.Tensor, valid: torch.Tensor) -> list:
        if index.ndim == 1:
            pairs = zip(index[valid].tolist(), weight[valid].tolist(), strict=True)
            return [{"key": key, "weight": value} for key, value in pairs]
        return [nest(*parts) for parts in zip(index, weight, valid, strict=True)]

    return nest(hits.index, hits.weight, hits.valid)


def table_of(hits: Hits, count: int) -> Table:
    """The first queries and their hits, a line for each query."""
    table = Table("query", "keys (weight), heaviest first", title="Heavy keys")
    places = list(np.ndindex(*hits.undefined.shape))
    for place in places[:count]:
        valid = hits.valid[place]
        pairs = zip(hits.index[place][valid].tolist(), hits.weight[place][valid].tolist(), strict=True)
        text = ", ".join(f"{key} ({weight:.4g})" for key, weight in pairs)
        empty = "nothing: no key has any weight" if hits.undefined[place] else "nothing"
        table.add_row(", ".join(map(str, place)), text or empty)
    if len(places) > count:
        table.add_row("…", f"{len(places) - count:,} more")
    return table
