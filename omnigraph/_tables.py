"""CSV files read row by row into arrays: memory for the numbers alone, and errors that name the line and the value.

Comment lines may stand above the header. A first one that says schema and totals, as in `# omnigraph.trace/1 rows=2 frames=85`,
is checked against what the file holds, so that a file cut short is noticed.
"""

from __future__ import annotations

import csv
import math
import os
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from omnigraph._files import FileError

_LINE = 65536  # characters read at once: a file without line ends takes no more memory than another


class Column(NamedTuple):
    """A column: its name, what its values are in words, the array's type, how a value is read and its bounds."""

    name: str
    what: str
    type: str
    read: Callable[[str], float]
    least: float
    most: float


def read_table(
    path: str | os.PathLike[str], schema: str, *formats: Sequence[Column], hint: str = ""
) -> tuple[dict[str, array[Any]], dict[str, str], str]:
    """Read the columns of the first of `formats` that the file's header has in full; other columns are ignored.

    Returns the columns by name, what the first line says besides the schema, and the other comment lines as one.

    Raises:
        FileError: no UTF-8, another schema, a missing column, no rows, a value that is none or out of bounds, other totals.
    """
    notes: list[str] = []
    said: dict[str, str] = {}
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as file:
            lines = iter(partial(file.readline, _LINE), "")
            while (line := next(lines, "")).startswith("#"):
                notes.append(" ".join(line[1:].split()))
            above = len(notes)
            if notes and notes[0].startswith("omnigraph."):
                found, *pairs = notes.pop(0).split()
                if found != schema:
                    raise FileError(f"{path}: expected the schema {schema!r}, found {found[:80]!r}")
                said = {key: value for key, _, value in (pair.partition("=") for pair in pairs)}
            rows = csv.reader(chain((line,), lines), strict=True)
            header = [name.strip() for name in next(filter(None, rows), [])]
            if not header:
                raise FileError(f"{path}: expected a header and rows, found an empty file")
            columns = next((columns for columns in formats if all(c.name in header for c in columns)), None)
            if columns is None:
                wanted = " or ".join(",".join(c.name for c in columns) for columns in formats)
                raise FileError(
                    f"{path}: expected a header with {wanted}; a column is missing in {','.join(header)[:200]!r}{hint and '; '}{hint}"
                )
            if twice := [c.name for c in columns if header.count(c.name) > 1]:
                raise FileError(f"{path}: the header names {', '.join(twice)} more than once: {','.join(header)[:200]!r}")
            held: dict[str, array[Any]] = {c.name: array(c.type) for c in columns}
            plan = [(c, header.index(c.name), c.read, c.least, c.most, held[c.name].append) for c in columns]
            for row in rows:
                if row and len(row) != len(header):
                    raise FileError(f"{path}, line {above + rows.line_num}: expected {len(header)} values, got {','.join(row)[:80]!r}")
                for column, at, read, least, most, append in plan if row else ():
                    try:
                        value = read(row[at])
                    except (ValueError, OverflowError):
                        value = math.nan
                    if not least <= value <= most:
                        line = f"line {above + rows.line_num}: expected {column.name} ({column.what}), got {row[at][:80]!r}"
                        raise FileError(f"{path}, {line}")
                    append(value)
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: expected UTF-8 text, found the byte {error.object[error.start]:#04x}; save it as UTF-8") from error
    except csv.Error as error:
        raise FileError(f"{path}, line {above + rows.line_num}: expected CSV; {error}") from error
    last = columns[-1].name
    totals = {"rows": len(held[last]), last: sum(held[last])}
    if not totals["rows"]:
        raise FileError(f"{path}: expected rows below the header, found none")
    if any(said.get(name, str(total)) != str(total) for name, total in totals.items()):
        raise FileError(f"{path}: holds {totals}, its first line says {str(said)[:80]}: cut short? If you edited it, delete that line")
    return held, said, " ".join(notes)
