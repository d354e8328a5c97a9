"""Traces, histograms, plans and profiles that are cut, hostile or from the future: one line that names the file. Saves that break off."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omnigraph._files import FileError
from omnigraph._points import Point
from omnigraph.profile import Profile
from omnigraph.shapes import BucketPlan, Shape
from omnigraph.trace import Trace, load_calls, save_calls

ROOT = Path(__file__).parents[2]
LOADS: dict[str, Callable[[Path], Any]] = {"trace": Trace.load, "calls": load_calls, "plan": BucketPlan.load, "profile": Profile.load}
SAVES: dict[str, Callable[[Path], Path]] = {
    "trace": lambda path: Trace([0.0, 0.125, 7.5], [12, 120, 25], source="a log").save(path),
    "calls": lambda path: save_calls(path, {Shape(1, 25): 3, Shape(4, 50): 100}),
    "plan": lambda path: BucketPlan(((1, 25), (4, 50)), ((1, 8),), {"model": "Code2Wav"}).save(path),
    "profile": lambda path: Profile(
        (Point(Shape(1, 8), "eager", 2.5, 0.5, 30), Point(Shape(1, 8), "plain", 1.5, 0.25, 30, 4096, 512, 0.5)),
        {"model": "Code2Wav"},
        {"date": "2026-01-01"},
        {"1x9": "no"},
    ).save(path),
}
HOSTILE = [None, True, -1, 0, 1.5, 10**400, -(10**400), 1e300, "", "x" * 100_000, "a\nb\r\nc", [], {}, [[[1]]], {"a": {"b": None}}]
DEEP = [50, 300, 900, 950, 980, 990, 100_000]


def refused_or_loaded(name: str, path: Path) -> bool:
    """Does it load? If it doesn't, it says so in one line that names the file."""
    try:
        LOADS[name](path)
    except FileError as error:
        text = str(error)
        assert text.startswith(str(path))
        assert len(text.splitlines()) == 1
        assert len(text) < len(str(path)) + 1000
        return False
    return True


def saved(tmp_path: Path, name: str) -> Path:
    path = SAVES[name](tmp_path / name)
    assert refused_or_loaded(name, path)
    return path


@pytest.mark.parametrize("name", LOADS)
def test_a_file_cut_at_any_byte_is_refused(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    whole = path.read_bytes()
    for at in range(len(whole) - 1):  # without the last line end it is whole
        path.write_bytes(whole[:at])
        assert not refused_or_loaded(name, path), at


@pytest.mark.parametrize("name", LOADS)
def test_a_file_with_any_bytes_changed_is_refused_or_read(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    whole, rng = path.read_bytes(), random.Random(0)
    for _ in range(300):
        at, change = rng.randrange(len(whole)), rng.choice([b"\0", b"\xff", b'"', b",", b"\n", b"-", b"9" * 30, b"[", b"", b"e999", b"nan"])
        path.write_bytes(whole[:at] + change + whole[at + rng.randint(0, 3) :])
        refused_or_loaded(name, path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where anything stands in a JSON document, itself included."""
    yield path
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        yield from places(one, (*path, key))


def put(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = dict(document) if isinstance(document, dict) else list(document)
    copied[place[0]] = put(document[place[0]], place[1:], value)
    return copied


@pytest.mark.parametrize("name", ["plan", "profile"])
def test_anything_anywhere_in_a_document_is_refused_or_read(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path, name)
    document = json.loads(path.read_text())
    loaded = 0
    for place in places(document):
        for value in HOSTILE:
            path.write_text(json.dumps(put(document, place, value)))
            loaded += refused_or_loaded(name, path)
    assert loaded > 20  # an extra note, another number


@pytest.mark.parametrize("name", ["plan", "profile"])
@pytest.mark.parametrize("depth", DEEP)
def test_a_deep_document_is_refused_or_read(tmp_path: Path, name: str, depth: int) -> None:
    path = saved(tmp_path, name)
    text = path.read_text()
    for deep in ("[" * depth + "]" * depth, '{"a": ' * depth + "1" + "}" * depth):
        path.write_text(text.replace('"Code2Wav"', deep))
        refused_or_loaded(name, path)
        path.write_text(deep)
        assert not refused_or_loaded(name, path)


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("plan", lambda text: text.replace('"plain"', '"plain": [], "plain"'), "the key 'plain' stands there twice"),
        ("profile", lambda text: text.replace('"ms"', '"ms": 1.0, "ms"'), "the key 'ms' stands there twice"),
        ("profile", lambda text: text.replace("2.5", "NaN"), "NaN is no number in JSON"),
        ("profile", lambda text: text.replace("2.5", "Infinity"), "Infinity is no number in JSON"),
        ("profile", lambda text: text.replace("2.5", "1e999"), "finite"),
        ("profile", lambda text: text.replace("2.5", "9" * 400), "too large"),
        ("profile", lambda text: text.replace("2.5", "true"), "expected numbers, got true or false"),
        ("profile", lambda text: text.replace('"ms"', '"m\\ns"'), "unexpected keyword argument 'm s'"),
        ("profile", lambda text: text.replace("8\n", "8.5\n", 1), "not a profile"),
        ("profile", lambda text: text.replace("2.5", "9" * 5000), "does not parse"),
        ("plan", lambda text: text.replace("Code2Wav", "\\ud800\xff").encode("latin-1"), "does not parse"),
        *((name, lambda text: text.replace("/1", "/2"), "expected the schema '.*/1', found '.*/2'") for name in LOADS),
        ("trace", lambda text: text.replace("frame_rate=12.5", "frame_rate=" + "x" * 60_000), "could not convert"),
        ("trace", lambda text: text.replace("frame_rate=12.5", "frame_rate=nan"), "frame_rate"),
        ("trace", lambda text: text.replace("120", "1" * 100_000), "line 5: expected frames"),
        ("trace", lambda text: text.replace("0.125", "nan"), "line 5: expected arrival"),
        ("trace", lambda text: text.replace("0.125", "0\0"), "trace.*line 5"),
        ("trace", lambda text: text.encode("utf-16"), "UTF-8"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, change: Callable[[str], str | bytes], says: str) -> None:
    path = saved(tmp_path, name)
    before = path.read_text()
    changed = change(before)
    assert changed != before
    path.write_bytes(changed if isinstance(changed, bytes) else changed.encode())
    assert not refused_or_loaded(name, path)
    with pytest.raises(FileError, match=says):
        LOADS[name](path)


@pytest.mark.parametrize("name", LOADS)
def test_a_folder_is_no_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(FileError, match="expected a file, found a folder"):
        LOADS[name](tmp_path)
    with pytest.raises(OSError, match="directory"):
        SAVES[name](tmp_path)
    assert [*tmp_path.iterdir()] == []  # nor is anything left beside it
    with pytest.raises(FileNotFoundError, match="none"):
        LOADS[name](tmp_path / "none")


KILLED = """
import os, resource, signal, sys
from pathlib import Path
from omnigraph import _files
from omnigraph._files import write_text

path, new = Path(sys.argv[1]), "new" * 4_000_000

def child(work):
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def killed_at(name, after):
    real = getattr(os, name)
    def call(*arguments):
        if after:
            real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(os, name, call)
    write_text(path, new)

for name, after, left in [("fsync", False, "old"), ("chmod", False, "old"), ("replace", False, "old"), ("replace", True, new)]:
    write_text(path, "old")
    assert child(lambda: killed_at(name, after)) == -signal.SIGKILL
    assert path.read_text() == left, name

halves = 0
for microseconds in range(200, 40_000, 1500):  # by the kernel, wherever it is then
    write_text(path, "old")
    for other in path.parent.glob(".*"):
        other.unlink()
    def work():
        signal.setitimer(signal.ITIMER_REAL, microseconds / 1e6)
        write_text(path, new)
    child(work)
    assert path.read_text() in ("old", new)
    halves += any(0 < other.stat().st_size < len(new) for other in path.parent.glob(".*"))

write_text(path, "old")
for other in path.parent.glob(".*"):
    other.unlink()
def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))  # the write itself fails, after a megabyte
    try:
        write_text(path, new)
    except OSError:
        os._exit(7)
assert child(full) == 7
assert path.read_text() == "old" and [*path.parent.iterdir()] == [path]
print(halves)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="kills processes as Linux does")
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "file")], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0  # some were killed in the middle of the text


ROWS = 400_000
PEAK = """
import resource, sys
from omnigraph.trace import Trace
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
Trace.load(sys.argv[1])  # imports numpy
before = peak()
print(len(Trace.load(sys.argv[2])), peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in other units elsewhere")
def test_a_long_trace_loads_in_memory_for_its_numbers(tmp_path: Path) -> None:
    """16 bytes a row are the numbers; 10 million rows: 11 s and 332 MB more, on two shared cores."""
    small, large = tmp_path / "small.csv", tmp_path / "large.csv"
    Trace([0.0], [1]).save(small)
    with large.open("w") as file:
        file.write("arrival,frames,note\n")
        file.writelines(f"{n / 8},{n % 700 + 1},text that is not kept\n" for n in range(ROWS))
    done = subprocess.run([sys.executable, "-c", PEAK, small, large], capture_output=True, text=True, cwd=ROOT, check=True)
    rows, grown = map(int, done.stdout.split())
    assert rows == ROWS
    assert grown < 2**22 + 40 * ROWS, grown / ROWS
