"""What every command shares: the application, the two consoles, progress, and checks of file names."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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


@contextmanager
def reading(label: str, keys: torch.Tensor, passes: int = 2) -> Iterator[Advance]:
    """A progress bar over the rows of the keys, on stderr, gone when done."""
    rows = keys.numel() // keys.shape[-1]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=notices, transient=True) as progress:
        task = progress.add_task(f"{label}, rows read", total=passes * rows)

        def advance(count: int) -> None:
            progress.advance(task, count)
            # Ill-conditioned keys are read once more.
            if progress.tasks[task].completed > passes * rows:
                progress.update(task, total=(passes + 1) * rows)

        yield advance


@contextmanager
def telling() -> Iterator[None]:
    """Warnings as plain lines on stderr, once the block is done."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        notices.print(str(warning.message), style="yellow", highlight=False, soft_wrap=True)


def require_extra(extra: str, *modules: str) -> None:
    """Nothing, if the modules of an optional part are installed; asked before any work is done."""
    missing = [name for name in modules if not installed(name)]
    if missing:
        raise ValueError(f"{' and '.join(missing)} not installed: pip install 'levattention[{extra}]'")


def installed(module: str) -> bool:
    """Whether a module can be imported, without doing so."""
    try:
        return find_spec(module) is not None
    except ValueError:
        # Python's word for a module that has been ruled out.
        return False


def require_suffix(path: Path | None, suffix: str) -> None:
    """Nothing, if the path ends as its format does; asked before any work is done."""
    if path is not None and path.suffix != suffix:
        raise ValueError(f"{path}: expected a name that ends in {suffix}")
    if path is not None and not path.parent.is_dir():
        raise ValueError(f"{path}: the folder {path.parent} does not exist")
