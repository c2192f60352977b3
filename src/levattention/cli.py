"""The command line: `levattention find`, `levattention demo`, `levattention planted`."""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from levattention.sources import open_keys, replacing
from levattention.universal import UniversalSet, universal_set

if TYPE_CHECKING:
    from collections.abc import Iterator

    from levattention.gram import Advance

app = typer.Typer(
    help="Find the keys that can ever receive a large attention weight.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
screen = Console()
notices = Console(stderr=True)


@app.command()
def find(
    file: Annotated[Path, typer.Argument(help="Keys (n, d) or (heads, n, d): .npy or .safetensors.")],
    eps: Annotated[float | None, typer.Option(help="Keep every key that can reach this weight.")] = None,
    top: Annotated[int | None, typer.Option(help="Keep this many keys instead.")] = None,
    tensor: Annotated[str | None, typer.Option(help="Which tensor of a .safetensors file.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write index, valid, scores and eps to this .npz.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Find the universal set of the keys in FILE, for f(x) = x²."""
    if (eps is None) == (top is None):
        raise ValueError("give exactly one of --eps and --top")
    require_suffix(out, ".npz")
    keys = open_keys(file, tensor)
    started = time.perf_counter()
    with reading(str(file), keys) as advance:
        found = universal_set(keys, eps=eps, k=top, advance=advance)
    seconds = time.perf_counter() - started
    if out is not None:
        save_set(out, found)
    summary = summarise(found, keys) | {"seconds": round(seconds, 3)}
    if as_json:
        print(json.dumps(summary | {"index": as_lists(found)}))
    else:
        show(summary, found)
        if out is not None:
            screen.print(f"written to {out}")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("demo-out"),
) -> None:
    """Plant heavy keys, find the universal set, attack it with a query search, draw a picture."""
    from levattention.report import run_demo

    run_demo(out, screen, notices)


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


def main() -> None:
    """Run the command line; bad input ends in one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        notices.print(f"levattention: {' '.join(str(error).split())}", style="red", highlight=False, soft_wrap=True)
        sys.exit(2)


@contextmanager
def reading(label: str, keys: torch.Tensor) -> Iterator[Advance]:
    """A progress bar over the rows of the keys, on stderr, gone when done."""
    rows = keys.numel() // keys.shape[-1]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notices, transient=True) as progress:
        task = progress.add_task(f"{label}, rows read", total=2 * rows)

        def advance(count: int) -> None:
            progress.advance(task, count)
            # Ill-conditioned keys are read a third time.
            if progress.tasks[task].completed > 2 * rows:
                progress.update(task, total=3 * rows)

        yield advance


def require_suffix(path: Path | None, suffix: str) -> None:
    """Nothing, if the path ends as its format does; asked before any work is done."""
    if path is not None and path.suffix != suffix:
        raise ValueError(f"{path}: expected a name that ends in {suffix}")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")


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


def summarise(found: UniversalSet, keys: torch.Tensor) -> dict[str, Any]:
    """What a person wants to know of the set before its members."""
    n, d = keys.shape[-2:]
    eps = found.eps.tolist()
    worst = float(found.eps.max())
    return {
        "n": n,
        "d": d,
        "batch": list(keys.shape[:-2]),
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
