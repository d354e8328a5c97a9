"""Plain files with a schema version, written so that an interrupted save leaves the old file or the new one, whole."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LONGEST = 1000  # characters of an error: a path and some words


class FileError(ValueError):
    """A file that cannot be what it should be; the text names the file, what was expected and what came, in one line.

    A hostile file may hold anything, so what is quoted of it is cut where it would fill a screen.
    """

    def __init__(self, text: str) -> None:
        line = " ".join(text.splitlines())
        super().__init__(line if len(line) <= _LONGEST else f"{line[:_LONGEST]}...")


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` beside `path`, then move it there in one step."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # else a machine that goes down may keep the new name and not what it holds
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def write_json(path: str | os.PathLike[str], schema: str, content: Mapping[str, Any]) -> Path:
    """Save `content` under a schema name such as "omnigraph.plan/1"."""
    return write_text(path, json.dumps({"schema": schema, **content}, indent=1, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str], schema: str) -> dict[str, Any]:
    """Load what `write_json` saved.

    Raises:
        FileError: it is a folder, it is no JSON object, a key stands there twice, or its schema is another one.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except IsADirectoryError as error:
        raise folder(path) from error
    except (ValueError, RecursionError) as error:  # what json and utf-8 raise, and int() for a number of too many digits
        raise FileError(f"{path}: expected JSON of the schema {schema!r}, but it does not parse: {error}") from error
    found = content.get("schema") if isinstance(content, dict) else None
    if found != schema:
        raise FileError(f"{path}: expected the schema {schema!r}, found {found!r}")
    assert isinstance(content, dict)
    return content


def folder(path: str | os.PathLike[str]) -> FileError:
    return FileError(f"{path}: expected a file, found a folder")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for name, value in pairs:
        if name in content:
            raise ValueError(f"the key {name!r} stands there twice")
        content[name] = value
    return content


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no number in JSON")
