"""The command line: one file for each command."""

from __future__ import annotations

import sys

from levattention.cli import demo, find, index, planted, query, vit, vit_look, vit_train
from levattention.cli.app import app, notices

__all__ = ["app", "demo", "find", "index", "main", "planted", "query", "vit", "vit_look", "vit_train"]


def main() -> None:
    """Run the command line; bad input ends in one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as error:
        notices.print(
            f"levattention: {' '.join(str(error).split())}", style="red", highlight=False, markup=False, soft_wrap=True
        )
        sys.exit(2)
