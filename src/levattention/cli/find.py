"""`levattention find`: the universal set of the keys in a file, in many files, or on standard input."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table

from levattention.cli.app import app, reading, require_suffix, screen
from levattention.cli.once import Checkpoint, read_once
from levattention.shards import expand
from levattention.sources import open_keys, replacing
from levattention.universal import UniversalSet, universal_set


@app.command()
def find(
    files: Annotated[
        list[str],
        typer.Argument(
            help="Keys (n, d) or (heads, n, d): .npy, .safetensors or .parquet files or quoted patterns, "
            "- for .npy arrays on standard input."
        ),
    ],
    eps: Annotated[float | None, typer.Option(help="Keep every key that can reach this weight.")] = None,
    top: Annotated[int | None, typer.Option(help="Keep this many keys instead (one file).")] = None,
    tensor: Annotated[str | None, typer.Option(help="Which tensor of a .safetensors file, or .parquet column.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write index, valid, scores and eps to this .npz.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    workers: Annotated[int | None, typer.Option(help="Read the keys once, this many pieces at a time.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="Read the keys once, and save the state here.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint, if there is one.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between checkpoints.")] = 30.0,
) -> None:
    """Find the universal set of the keys in FILES, for f(x) = x². Positions go on from file to file."""
    if (eps is None) == (top is None):
        raise ValueError("give exactly one of --eps and --top")
    if resume and checkpoint is None:
        raise ValueError("--resume needs --checkpoint FILE")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers: expected at least 1, got {workers}")
    require_suffix(out, ".npz")
    names = files if "-" in files else expand(files)
    started = time.perf_counter()
    if len(names) == 1 and names != ["-"] and workers is None and checkpoint is None:
        keys = open_keys(names[0], tensor)
        with reading(names[0], keys) as advance:
            found = universal_set(keys, eps=eps, k=top, advance=advance)
        summary = summarise(found, *keys.shape[-2:], batch=keys.shape[:-2])
    else:
        if eps is None:
            raise ValueError("--top needs a single file, read without --workers and --checkpoint; give --eps")
        stream = read_once(names, eps, tensor, workers or 1, Checkpoint(checkpoint, every), resume)
        found = stream.finish()
        summary = summarise(found, stream.count, stream.d, batch=stream.batch)
        summary |= {name: stream.stats()[name] for name in ("kept", "peak", "spared")}
    seconds = time.perf_counter() - started
    if out is not None:
        save_set(out, found)
    summary |= {"seconds": round(seconds, 3)}
    if as_json:
        print(json.dumps(summary | {"index": as_lists(found)}))
    else:
        show(summary, found)
        if out is not None:
            screen.print(f"written to {out}")


def save_set(path: Path, found: UniversalSet) -> None:
    """Write the set; for keys without batch dimensions only the valid slots."""
    arrays = {"index": found.index, "valid": found.valid, "scores": found.scores}
    if found.index.ndim == 1:
        arrays = {name: values[found.valid] for name, values in arrays.items()}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, allow_pickle=False, eps=found.eps.numpy(), **{k: v.numpy() for k, v in arrays.items()})


def as_lists(found: UniversalSet) -> Any:
    """Positions of the keys, nested as the batch is."""

    def nest(index: torch.Tensor, valid: torch.Tensor) -> Any:
        return index[valid].tolist() if index.ndim == 1 else [nest(*pair) for pair in zip(index, valid, strict=True)]

    return nest(found.index, found.valid)


def summarise(found: UniversalSet, n: int, d: int, *, batch: Iterable[int]) -> dict[str, Any]:
    """What a person wants to know of the set before its members."""
    eps = found.eps.tolist()
    worst = float(found.eps.max())
    return {
        "n": n,
        "d": d,
        "batch": list(batch),
        "rank": None if found.rank is None else found.rank.tolist(),
        "condition": None if found.condition is None else found.condition.tolist(),
        "route": found.route,
        "eps": eps,
        "size": found.size.tolist(),
        "bound": None if worst == 0 else int(min(n, d / worst + 1e-6)),
    }


def show(summary: dict[str, Any], found: UniversalSet) -> None:
    """The summary and the ten best keys of the first head."""
    table = Table(title="Universal set for f(x) = x²", show_header=False)
    for name, value in summary.items():
        if value not in (None, []):
            table.add_row(name, f"{value:.6g}" if isinstance(value, float) else str(value))
    screen.print(table)
    index, valid, scores = (t.reshape(-1, t.shape[-1])[0] for t in (found.index, found.valid, found.scores))
    best = Table("key", "largest weight any query can give it", title="Heaviest keys")
    for position, score in list(zip(index[valid].tolist(), scores[valid].tolist(), strict=True))[:10]:
        best.add_row(str(position), f"{score:.6f}")
    if best.row_count:
        screen.print(best)
    else:
        screen.print("No key can reach this weight.")
