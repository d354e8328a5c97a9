"""What a notebook cell shows of an object: small, offline, and what the object says."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from omnigraph._html import SHOWN, table
from omnigraph._points import Point
from omnigraph._warmup import BucketReport, CaptureReport
from omnigraph.compare import Compared, Comparison, verify
from omnigraph.decoder import GraphedDecoder
from omnigraph.models import tiny
from omnigraph.planner import plan_buckets
from omnigraph.prefix import DecodeGraphCache
from omnigraph.profile import Profile
from omnigraph.shapes import Bucket, BucketPlan, Shape
from omnigraph.stats import Fallback, Outcome, ReplayStats

ROOT = Path(__file__).parents[1]
PLAN = BucketPlan.grid([1, 4], [4, 8], compiled=[(1, 8)])


def read(html: str) -> tuple[str, list[list[str]], list[str]]:
    """Title, rows (the head first) and notes of what is well-formed, small and asks for nothing from elsewhere."""
    assert len(html) < 20_000
    assert not re.search(r"<(script|style|link|img|iframe)|https?:|url\(| on\w+=", html)
    whole = ElementTree.fromstring(html)
    title = whole.findtext("b")
    assert title is not None
    return title, [[cell.text or "" for cell in row] for row in whole.iter("tr")], [note.text or "" for note in whole.findall("div")]


def profile(**more: Any) -> Profile:
    points = [
        Point(Shape(b, f), how, ms + 0.1 * b * f, bytes_marginal=2**20, bytes_alone=2**21, seconds=0.5)
        for b, f, (how, ms) in itertools.product((1, 4), (4, 8), (("eager", 12.0), ("plain", 2.0)))
    ]
    return Profile(tuple(points), {"model": "Tiny", "dtype": "float32"}, **more)


def test_a_plan_lists_its_lengths_by_batch_size() -> None:
    assert read(PLAN._repr_html_()) == (
        "BucketPlan: 4 buckets",
        [["batch", "plain (frames)", "compiled (frames)"], ["1", "4", "8"], ["4", "4, 8", ""]],
        [],
    )
    assert read(BucketPlan(((1, 4),), made_for={"model": "Tiny", "device": "a <b>"})._repr_html_())[::2] == (
        "BucketPlan: 1 bucket",
        ["made for Tiny, a <b>"],
    )


def test_a_decoder_is_warmed_up_called_and_compared() -> None:
    with GraphedDecoder(tiny(), BucketPlan.grid([1], [4, 8])) as decoder:
        title, rows, notes = read(decoder.warmup(strict=True)._repr_html_())
        assert title.startswith("2 of 2 buckets captured on cpu")
        assert [row[:2] for row in rows] == [["bucket", "captured as"], ["1x8", "1x8"], ["1x4", "1x4"]]
        assert notes == []
        assert read(decoder.warmup()._repr_html_())[1:] == ([], ["already warmed up: nothing was done"])
        for frames in (4, 4, 3, 9):
            decoder.decode(torch.zeros(1, decoder.num_quantizers, frames, dtype=torch.int64))
        title, rows, _ = read(decoder.stats._repr_html_())
        assert title == "ReplayStats: 4 calls, hit rate 0.75, 1 frames of padding"
        assert rows == [
            ["served", "reason", "calls", "share"],
            ["exact", "", "2", "50.0%"],
            ["fallback", "no_bucket", "1", "25.0%"],
            ["padded", "", "1", "25.0%"],
        ]
        title, rows, _ = read(verify(decoder, [(1, 4), (1, 9)])._repr_html_())
        assert title == "2 calls in float32 on cpu: all as eager, 2 of them bitwise; 1 went eager, with no replay to check"
        assert [row[:4] for row in rows[1:]] == [["1x4", "exact", "1x4", "yes"], ["1x9", "fallback", "no_bucket", "yes"]]


def test_without_calls_there_is_nothing_to_list() -> None:
    assert read(ReplayStats()._repr_html_()) == ("ReplayStats: 0 calls, hit rate 0.00, 0 frames of padding", [], [])


def test_compiled_replays_are_told_apart() -> None:
    stats = ReplayStats()
    stats.record("a key", Outcome("exact", (Bucket(Shape(1, 4), True),)))
    stats.record("a key", Outcome("fallback", reason=Fallback.NO_PREFIX))
    assert [row[:2] for row in read(stats._repr_html_())[1][1:]] == [["exact compiled", ""], ["fallback", "no_prefix"]]


def test_what_failed_comes_first() -> None:
    rows = (BucketReport(Bucket(Shape(1, 8)), Bucket(Shape(1, 8))), BucketReport(Bucket(Shape(1, 4)), error="CaptureError: a < b"))
    _, listed, notes = read(CaptureReport(rows, "cpu", note="half of it")._repr_html_())
    assert [[row[i] for i in (0, 1, 5)] for row in listed[1:]] == [["1x4", "no graph", "CaptureError: a < b"], ["1x8", "1x8", ""]]
    assert notes == ["half of it"]
    exact = Outcome("exact", (Bucket(Shape(1, 8)),))
    good, bad = (Compared(Shape(1, 8), exact, not problem, 0.1, 0.1, 9.0, 1.0, problem) for problem in ("", "not bitwise equal"))
    title, listed, _ = read(Comparison((good, bad), "float32", "cpu")._repr_html_())
    assert title.endswith("1 not as eager, 1 of them bitwise")
    assert [row[-1] for row in listed[1:]] == ["not bitwise equal", ""]


def test_a_profile_lists_its_shapes_and_where_it_was_measured() -> None:
    measured = profile(provenance={"device": "A GPU", "date": "2026-01-01", "method": "median"}, failed={"8x8": "out of memory"})
    title, rows, notes = read(measured._repr_html_())
    assert title == "Profile of Tiny, float32: 4 shapes eager, 4 plain, 0 compiled"
    assert rows[:2] == [["call", "eager ms", "replay ms", "compiled ms"], ["1x4", "12.4", "2.4", ""]]
    assert notes == ["device A GPU, date 2026-01-01", "no graph of 8x8: out of memory"]


def test_a_report_begins_with_its_verdict() -> None:
    report = plan_buckets({Shape(1, 4): 900, Shape(1, 8): 100}, profile(), max_graphs=1)
    title, rows, notes = read(report._repr_html_())
    assert title == report.verdict
    assert [row[0] for row in rows] == ["", "eager", "plan", "heuristic", "floor"]
    assert rows[1][1:3] == ["0", "12.44"]
    assert notes[0].startswith("Plan: 1x8.")


def test_a_cache_lists_its_keys() -> None:
    pytest.importorskip("diffusers")
    from omnigraph.models._qwen_adapter import QwenImageAdapter
    from omnigraph.models._qwen_image import qwen_image
    from omnigraph.models.diffusion import denoise, image_request

    model = qwen_image("small", seed=1)
    cache = DecodeGraphCache(QwenImageAdapter(model))
    assert read(cache._repr_html_())[1] == []
    denoise(model, image_request(model, (4, 4), text_tokens=6), steps=3, graphs=cache)
    title, rows, _ = read(cache._repr_html_())
    assert title.startswith("DecodeGraphCache: 1 entries, 1 captured")
    assert dict(zip(*rows, strict=True))["replays"] == "2"
    cache.clear()


def test_long_tables_are_cut_and_say_so() -> None:
    _, rows, notes = read(table("numbers", ["n"], ([n] for n in range(SHOWN + 1234))))
    assert (len(rows), notes) == (SHOWN + 1, ["and 1,234 more"])


def test_values_are_written_for_readers() -> None:
    row = [1234567, 0.000123456, True, float("nan"), float("inf"), "<b>&", None]
    assert read(table("values", list("abcdefg"), [row]))[1][1] == ["1,234,567", "0.0001235", "yes", "", "inf", "<b>&", "None"]


def test_no_table_needs_more_than_torch() -> None:
    program = (
        "import sys; sys.modules['pandas'] = None; import omnigraph as og; from omnigraph.stats import ReplayStats; "
        "print(og.BucketPlan.grid([1], [4])._repr_html_(), ReplayStats()._repr_html_())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.count("<div>") == 2
