from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from omnigraph.__main__ import main
from omnigraph._vllm_omni import from_vllm_omni
from omnigraph.models import tiny
from omnigraph.profile import Profile
from omnigraph.shapes import BucketPlan, Shape
from omnigraph.stats import Outcome, ReplayStats
from omnigraph.trace import Trace

Said = pytest.CaptureFixture[str]


class Forgetful(torch.nn.Module):
    """Eager counts its calls in its output, a replay cannot: what `verify` must find."""

    num_quantizers, codebook_size = 4, 32

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = tiny(), 0

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        audio: torch.Tensor = self.inner(codes)
        return audio if self.calls < 60 else audio * 1.5


def no_module() -> int:
    return 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile of the small decoder, a trace and shape counts."""
    here = tmp_path_factory.mktemp("cli")
    assert main(["profile", "tiny", "--shapes", "1x4", "1x8", "1x16", "2x8", "--repeats", "5", "--out", str(here / "profile.json")]) == 0
    Trace([0.0, 1.0, 2.0], [9, 5, 30]).save(here / "trace.csv")
    stats = ReplayStats()
    for shape in (Shape(1, 8), Shape(1, 8), Shape(2, 8)):
        stats.record(shape, Outcome("exact"))
    stats.save_calls(here / "counts.csv")
    return here


def test_profile_measures_and_resumes(folder: Path, capsys: Said) -> None:
    before = Profile.load(folder / "profile.json")
    assert list(before.plain) == [Shape(1, 4), Shape(1, 8), Shape(1, 16), Shape(2, 8)]
    command = ["profile", "tiny", "--batches", "1", "2", "--lengths", "4", "8", "--repeats", "5", "--out", str(folder / "more.json")]
    before.save(folder / "more.json")
    assert main(command) == 0
    after = Profile.load(folder / "more.json")
    assert set(before.points) < set(after.points)
    assert Shape(2, 4) in after.plain
    assert "speedup" in capsys.readouterr().out


def faster(folder: Path) -> Path:
    """The measured profile with times that grow with the shape, and half of them for replays: on a CPU there may be no plan else."""
    content = json.loads((folder / "profile.json").read_text())
    for p in content["points"]:
        batch, frames = p["shape"]
        p["ms"] = (1 + batch * frames / 8) / (2 if p["how"] == "plain" else 1)
    (folder / "faster.json").write_text(json.dumps(content))
    return folder / "faster.json"


def test_plan_then_verify(folder: Path, capsys: Said) -> None:
    command = ["plan", str(folder / "trace.csv"), str(faster(folder)), "--chunk-size", "8", "--left-context-size", "8", "--max-graphs", "2"]
    assert (
        main([*command, "--out", str(folder / "plan.json"), "--vllm-omni", str(folder / "o.yaml"), "--vllm", str(folder / "v.json")]) == 0
    )
    said = capsys.readouterr().out
    assert "Graphs pay" in said
    assert "lost: when it streams" in said
    plan = BucketPlan.load(folder / "plan.json")
    assert len(plan) == 2
    settings = from_vllm_omni((folder / "o.yaml").read_text())
    assert (settings.chunk_size, settings.left_context_size) == (8, 8)
    assert json.loads((folder / "v.json").read_text()) == {"cudagraph_capture_sizes": sorted(s.frames for s in plan.plain)}
    assert main(["verify", "tiny", str(folder / "plan.json")]) == 0
    assert "4 calls in float32 on cpu: all as eager" in capsys.readouterr().out


def test_verify_by_a_profile_that_sends_all_calls_eager_proves_nothing(folder: Path, capsys: Said) -> None:
    content = json.loads((folder / "profile.json").read_text())
    for p in content["points"]:
        p["ms"] = 1.0 if p["how"] == "eager" else 2.0
    (folder / "slower.json").write_text(json.dumps(content))
    plan = BucketPlan.grid([1], [8]).save(folder / "one.json")
    assert main(["verify", "tiny", str(plan), "--profile", str(folder / "slower.json")]) == 1
    assert "2 went eager, with no replay to check" in capsys.readouterr().out


def test_without_a_plan_nothing_is_written_and_that_is_said(folder: Path, capsys: Said) -> None:
    out = folder / "none.json"
    assert main(["plan", str(folder / "counts.csv"), str(faster(folder)), "--max-seconds", "1e-9", "--out", str(out)]) == 1
    assert not out.exists()
    assert f"no plan: {out} is not written" in capsys.readouterr().err


def test_plan_from_shape_counts(folder: Path, capsys: Said) -> None:
    assert main(["plan", str(folder / "counts.csv"), str(faster(folder)), "--max-bytes", "1GiB", "--max-seconds", "9"]) == 0
    assert "Plan: 1x8 2x8." in capsys.readouterr().out


def test_verify_exits_with_1_where_a_replay_differs(folder: Path, capsys: Said) -> None:
    plan = BucketPlan.grid([1], [8]).save(folder / "one.json")
    shapes = ["--shapes", *["1x8"] * 60]
    assert (
        main(["verify", "tests.test_cli:Forgetful" if __name__.startswith("tests.") else f"{__name__}:Forgetful", str(plan), *shapes]) == 1
    )
    assert "not as eager" in capsys.readouterr().out


def test_verify_exits_with_1_where_a_bucket_was_not_captured(folder: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("omnigraph.__main__.BUILT_IN", {"tiny": lambda: tiny(host_read=True)})
    plan = BucketPlan.grid([1], [8]).save(folder / "one.json")
    assert main(["verify", "tiny", str(plan)]) == 1
    assert "0 of 1 buckets captured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required"),
        (["plan", "trace.csv"], "required: profile"),
        (["plan", "trace.csv", "profile.json", "--max-bytes", "lots"], "bytes are a number"),
        (["plan", "trace.csv", "profile.json", "--compiled", "25"], "a shape is BATCHxFRAMES, such as 4x25; got '25'"),
        (["profile", "tiny", "--shapes", "0x4", "--out", "x"], "a shape is BATCHxFRAMES"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], message: str, capsys: Said) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "trace.csv", "none.json"], "none.json"),
        (["plan", "none.csv", "profile.json"], "none.csv"),
        (["plan", "profile.json", "profile.json"], "neither shape counts"),
        (["plan", "trace.csv", "trace.csv"], "expected JSON of the schema 'omnigraph.profile/1'"),
        (["plan", "trace.csv", "profile.json", "--max-graphs", "0"], "max_graphs must be above 0"),
        (["plan", "trace.csv", "profile.json", "--compiled", "all"], "compiled buckets need a profile with compiled times"),
        (["verify", "tiny", "trace.csv"], "expected JSON of the schema 'omnigraph.plan/1'"),
        (
            ["profile", "giant", "--out", "x.json"],
            "a model is one of code2wav, code2wav-small, mimi, encodec, dac, tiny or package.module:factory",
        ),
        (["profile", "no.such:module", "--out", "x.json"], "no.such:module: ModuleNotFoundError"),
        (["profile", "omnigraph.shapes:nothing", "--out", "x.json"], "AttributeError"),
        (["profile", "builtins:int", "--out", "x.json"], "must make a torch.nn.Module, it made int"),
        (["profile", "torch.nn:Identity", "--out", "x.json"], "num_quantizers"),
        (["profile", "tiny", "--device", "abacus", "--out", "x.json"], "abacus"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, folder: Path, capsys: Said) -> None:
    made = [str(folder / a) if a.endswith((".json", ".csv")) else a for a in arguments]
    assert main(made) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("omnigraph: error: ")
    assert said.count("\n") == 1


def test_warnings_are_notes(folder: Path, capsys: Said) -> None:
    Trace([0.0], [200]).save(folder / "long.csv")
    assert main(["plan", str(folder / "long.csv"), str(folder / "profile.json"), "--chunk-size", "300"]) == 0
    said = capsys.readouterr()
    assert said.err.startswith("note: 1x200 eager lies outside the measured shapes")
    assert "extrapolated beyond what was measured: 1x200 eager" in said.out


@pytest.mark.parametrize("command", ["profile", "plan", "verify"])
def test_help_has_an_example(command: str, capsys: Said) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"example: python -m omnigraph {command} " in capsys.readouterr().out


def test_from_the_shell(folder: Path) -> None:
    command = [sys.executable, "-m", "omnigraph", "plan", "none.csv", str(folder / "profile.json")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1], check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("omnigraph: error: ")
