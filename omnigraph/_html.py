"""Small tables for notebooks: plain HTML, without scripts, styles or anything from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from itertools import islice

SHOWN = 40  # rows
NUMBERS = (int, float)


def table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]], notes: Iterable[str] = (), *, shown: int = SHOWN) -> str:
    """A title, a table of at most `shown` rows (more are counted), and notes below; all text is escaped.

    >>> table("a < b", ["n"], [[1.5]])
    '<div><b>a &lt; b</b><table><tr><th>n</th></tr><tr><td style="text-align:right">1.5</td></tr></table></div>'
    """
    listed = iter(rows)
    lines = ["".join(map(_cell, row)) for row in islice(listed, shown)]
    more = sum(1 for _ in listed)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{line}</tr>" for line in [head, *lines]) if lines else ""
    below = "".join(f"<div>{escape(note)}</div>" for note in [*[f"and {more:,} more"] * bool(more), *notes] if note)
    return f"<div><b>{escape(title)}</b>{f'<table>{body}</table>' if body else ''}{below}</div>"


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, NUMBERS):
        text = f"{value:,}" if isinstance(value, int) else "" if value != value else f"{value:.4g}"
        return f'<td style="text-align:right">{text}</td>'
    return f"<td>{escape(str(value))}</td>"
