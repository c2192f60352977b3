"""What the reports share: one HTML page that needs nothing else, its tables and pictures, and files written whole."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from levattention.sources import replacing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --faint: #5b6675; --paper: #fff; --line: #e1e6ec; --card: #f6f8fa;
  --accent: #1f6feb; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ef; --faint: #9aa7b8; --paper: #11161d; --line: #2b3442;
  --card: #1a212b; --accent: #6ea8fe; } }
* { box-sizing: border-box; }
body { font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; max-width: 68rem; margin: 0 auto;
  padding: 2.5rem 1.25rem 4rem; color: var(--ink); background: var(--paper); overflow-wrap: break-word; }
h1 { font-size: clamp(1.7rem, 5vw, 2.5rem); line-height: 1.15; letter-spacing: -0.02em; margin: 0 0 0.6rem; }
h2 { font-size: 1.4rem; letter-spacing: -0.01em; margin: 3.2rem 0 0.6rem; padding-top: 1.2rem;
  border-top: 1px solid var(--line); }
h3 { font-size: 1.05rem; margin: 2rem 0 0.4rem; }
p, li { max-width: 46rem; } .lead { font-size: 1.1rem; color: var(--faint); }
a { color: var(--accent); }
code { font-size: 0.9em; background: var(--card); padding: 0.1em 0.3em; border-radius: 4px; }
figure { margin: 1.5rem 0; }
figcaption { color: var(--faint); font-size: 0.9rem; max-width: 46rem; margin-top: 0.6rem; }
img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 10px; padding: 0.5rem; }
.scroll { overflow-x: auto; }
.scroll img { min-width: 42rem; max-width: none; width: 100%; }
.small img { max-width: min(100%, 24rem); }
.wide { overflow-x: auto; border: 1px solid var(--line); border-radius: 10px; margin: 1.2rem 0; }
.wide table { margin: 0; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 0.4rem 0.75rem; text-align: right; border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; } th { background: var(--card); font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child { text-align: left; } .figures td { white-space: nowrap; }
.summary td { text-align: left; font-size: 0.95rem; } .summary td:first-child { color: var(--faint); }
.fails td { color: var(--faint); opacity: 0.75; } .full td { background: var(--card); font-weight: 600; }
.bar { display: inline-block; height: 0.55rem; border-radius: 3px; background: var(--accent); vertical-align: middle; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 12rem), 1fr)); gap: 1rem;
  margin: 1.5rem 0; }
.cards div { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 0.9rem 1.1rem;
  color: var(--faint); font-size: 0.9rem; line-height: 1.4; }
.cards b { display: block; font-size: 1.7rem; line-height: 1.3; color: var(--ink); letter-spacing: -0.02em; }
footer { margin-top: 4rem; color: var(--faint); font-size: 0.85rem; }
"""


def write(path: Path, content: bytes) -> None:
    """Replace the file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def picture(figure: Figure, dpi: int = 130) -> bytes:
    """The figure as PNG."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()


def photo(figure: Figure, dpi: int = 110) -> bytes:
    """The figure as JPEG, for pictures that hold photographs."""
    stream = io.BytesIO()
    figure.savefig(stream, format="jpeg", dpi=dpi, pil_kwargs={"quality": 82})
    return stream.getvalue()


def canvas(columns: int = 1, width: float = 8.0, height: float = 4.6, **shared: Any) -> tuple[Figure, list[Any]]:
    """A figure that belongs to no window, and its axes from left to right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **shared)[0]
    for one in axes:
        one.grid(True, which="major", alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes)


def page(title: str, body: str, lead: str = "") -> str:
    """The report as one HTML page that needs nothing else; `body` is HTML, the title and the lead are text."""
    opening = f'<p class="lead">{html.escape(lead)}</p>\n' if lead else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>\n"
        f"<h1>{html.escape(title)}</h1>\n{opening}{body}</body></html>\n"
    )


def shown(picture: bytes, alt: str, caption: str, size: str = "") -> str:
    """A picture inside the page, with what it shows for those who do not see it and for those who do.

    Args:
        picture: PNG or JPEG.
        alt: text.
        caption: text.
        size: "scroll" for a wide picture that scrolls sideways rather than shrink to nothing, "small" for a small one.
    """
    kind = "png" if picture.startswith(b"\x89PNG") else "jpeg"
    source = base64.b64encode(picture).decode()
    return (
        f'<figure><div class="{size}"><img alt="{html.escape(alt)}" src="data:image/{kind};base64,{source}"></div>'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>\n"
    )


def cells(values: Iterable[Any], tag: str = "td") -> str:
    """Table cells."""
    return "".join(f"<{tag}>{html.escape(str(value))}</{tag}>" for value in values)


def grid_table(head: Iterable[Any], rows: Iterable[tuple[str, Iterable[Any]]]) -> str:
    """A table of figures that scrolls sideways where it does not fit; each row comes with its CSS class."""
    lines = "".join(f'<tr class="{name}">{cells(values)}</tr>\n' for name, values in rows)
    return f'<div class="wide"><table class="figures"><tr>{cells(head, "th")}</tr>\n{lines}</table></div>\n'


def summary_table(lines: Iterable[tuple[str, str]]) -> str:
    """A table of two columns: what, and how much."""
    rows = "".join(f"<tr>{cells(line)}</tr>\n" for line in lines)
    return f'<table class="summary">{rows}</table>\n'


def percent(value: float | None) -> str:
    """A share as a percentage; a dash where there is none."""
    return "–" if value is None else f"{value:.1%}"
