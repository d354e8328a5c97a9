"""Files are whole or not there, and say what is wrong with them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from omnigraph import _files
from omnigraph._files import FileError, read_json, write_json, write_text


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write_json(tmp_path / "a" / "b.json", "omnigraph.test/1", {"x": [1, 2.5, None], "y": {"é": "ü"}})
    assert path == tmp_path / "a" / "b.json"
    assert read_json(path, "omnigraph.test/1") == {"schema": "omnigraph.test/1", "x": [1, 2.5, None], "y": {"é": "ü"}}
    assert path.read_text(encoding="utf-8").endswith("}\n")
    assert read_json(str(path), "omnigraph.test/1")["x"][1] == 2.5


def test_writing_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "text.csv"
    write_text(path, "old\n")
    write_text(path, "new\r\nlines\n")
    assert path.read_bytes() == b"new\r\nlines\n"
    assert os.listdir(tmp_path) == ["text.csv"]
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    path = write_text(tmp_path / "text", "old")

    def interrupted(*args: object) -> None:
        raise error

    with pytest.raises(UnicodeEncodeError):  # in the middle of the text
        write_text(path, "new \ud800")
    for name in ("replace", "chmod"):
        with monkeypatch.context() as patch:
            patch.setattr(_files.os, name, interrupted)
            with pytest.raises(error):
                write_text(path, "new")
        assert path.read_text() == "old"
        assert os.listdir(tmp_path) == ["text"]


def test_what_json_cannot_hold_is_not_written(tmp_path: Path) -> None:
    path = write_json(tmp_path / "x.json", "omnigraph.test/1", {"x": 1})
    for content in ({"x": float("nan")}, {"x": float("inf")}, {"x": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, "omnigraph.test/1", content)
    assert read_json(path, "omnigraph.test/1")["x"] == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"schema": "omnigraph.test/1", "x": [1, 2', b"\xff\xfe{}", b"[" * 100_000, b'{"x": ' + b"9" * 5000 + b"}", b"no json"],
    ids=["empty", "brace", "truncated", "not utf-8", "deep", "digits", "text"],
)
def test_files_that_do_not_parse(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(FileError, match=r"x\.json: expected JSON of the schema 'omnigraph\.test/1', but it does not parse: "):
        read_json(path, "omnigraph.test/1")


@pytest.mark.parametrize(
    "content", [[], {}, "omnigraph.test/1", None, {"schema": "omnigraph.test/2"}, {"schema": 1}, {"schema": "other/1"}]
)
def test_files_of_another_schema(tmp_path: Path, content: object) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(content))
    with pytest.raises(FileError, match=r"x\.json: expected the schema 'omnigraph\.test/1', found "):
        read_json(path, "omnigraph.test/1")


def test_a_missing_file_is_pythons_own_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", "omnigraph.test/1")
    assert issubclass(FileError, ValueError)
