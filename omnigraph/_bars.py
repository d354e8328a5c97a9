"""The bars of speed that the project sets itself on an H200, and how measured rows stand against them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Row = Mapping[str, Any]  # row (a bar's name), value, low, high (its spread), how (both sides, in words); predicted, where measured anew
Spread = Mapping[str, float]  # median, q1, q3
Verdict = Literal["met", "missed", "not measured", "needs a GPU"]


@dataclass(frozen=True)
class Bar:
    """A bar: at least `target`, or with `at_most` at most that. `predicted` is what earlier measurements on an H200 let expect."""

    row: str
    what: str
    target: float
    predicted: float | None = None
    at_most: bool = False
    unit: str = "times"
    anywhere: bool = False  # can be measured without a GPU, though the target is an H200's

    @property
    def limit(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.target:g}{'' if self.unit == 'times' else ' ' + self.unit}"

    def verdict(self, row: Row | None, cuda: bool = True) -> Verdict:
        """Whether a measured row meets the bar; what is not a number does not.

        >>> Bar("x", "", 3.0).verdict({"value": 2.99}), Bar("x", "", 3.0, at_most=True).verdict({"value": 2.99})
        ('missed', 'met')
        """
        if row is None:
            return "not measured" if cuda or self.anywhere else "needs a GPU"
        return "met" if (row["value"] <= self.target if self.at_most else row["value"] >= self.target) else "missed"


BARS = (
    Bar("compiled", "Code2Wav bf16, decode 1x50, compiled and graphed, against eager", 3.0, 3.2),
    Bar("plain", "Code2Wav bf16, decode 1x4, plain graph, against eager", 4.0, 4.3),
    Bar("host", "decode against bare copy, replay, clone: host time, no staleness check", 1.2, 1.2, at_most=True, anywhere=True),
    Bar("host_checked", "host time that the staleness check adds", 50.0, 60.0, at_most=True, unit="us", anywhere=True),
    Bar("capture_time", "capture of 33 shapes against a smallest-first loop: time", 0.65, 0.6, at_most=True),
    Bar("capture_memory", "capture of 33 shapes against a smallest-first loop: memory", 0.85, 0.79, at_most=True),
    Bar("ragged", "8 ragged requests packed, against equal lengths by round on the same graphs", 1.3, 1.4),
    Bar("plans_time", "2,000 calls of the trace, chosen plan against heuristic: time (1 % for noise)", 1.01, at_most=True),
    Bar("plans_memory", "2,000 calls of the trace, chosen plan against heuristic: memory", 0.5, at_most=True),
    Bar("step", "Qwen-Image-2.1 step, 256 target tokens, compiled blocks in the graph, against eager", 3.8, 4.0),
    Bar("first_audio", "compute to a stream's first audio, ramp of 5, against eager's first chunk of 25", 3.0, 4.2),
)


def ratio(row: str, over: Spread, under: Spread, how: str) -> dict[str, Any]:
    """How many times `over` is `under`: of the medians, with the widest ratios of their quartiles as the spread."""
    value = over["median"] / under["median"]
    return {"row": row, "value": value, "low": over["q1"] / under["q3"], "high": over["q3"] / under["q1"], "how": how}


def compared(row: str, names: tuple[str, str], slow: Spread, fast: Spread) -> dict[str, Any]:
    """`ratio` of two times in milliseconds, told by name."""
    told = (f"{name} {times['median']:.2f} ms" for name, times in zip(names, (slow, fast), strict=True))
    return ratio(row, slow, fast, ", ".join(told))


def standing(own: Spread, other: Spread) -> Literal["ahead", "level", "behind"]:
    """How a time stands beside another: level where the quartiles overlap or the medians are within 2 %.

    >>> standing({"median": 4.4, "q1": 4.3, "q3": 4.5}, {"median": 4.45, "q1": 4.4, "q3": 4.6})
    'level'
    """
    near = abs(own["median"] / other["median"] - 1) <= 0.02
    if near or (own["q1"] <= other["q3"] and other["q1"] <= own["q3"]):
        return "level"
    return "ahead" if own["median"] < other["median"] else "behind"


def host_rows(host: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The two rows of host time: the worst of all shapes, of calls on an idle device and of ten in a row; the spread is over these."""
    ways, cases = ("bare", "decode", "decode_checked"), dict[str, dict[str, float]]()
    for row in host:
        for how, times in (("", row), (" in a row", row["in_a_row"])):
            cases[f"{'x'.join(map(str, row['shape']))}{how}"] = {way: times[f"{way}_us"]["median"] for way in ways}
    found = []
    for name, values in (
        ("host", {case: us["decode"] / us["bare"] for case, us in cases.items()}),
        ("host_checked", {case: us["decode_checked"] - us["decode"] for case, us in cases.items()}),
    ):
        worst = max(values, key=values.__getitem__)
        bare, decode, checked = (f"{cases[worst][way]:.0f}" for way in ways)
        how = f"{worst}: bare {bare} us, decode {decode}, checked {checked}"
        found.append({"row": name, "value": values[worst], "low": min(values.values()), "high": values[worst], "how": how})
    return found


def capture_rows(startup: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two rows of a start-up, from its rounds but the first, which loads kernels."""
    rounds, found = startup["rounds"][1:], []
    for what, key, scale, unit in (("time", "s", 1.0, "s"), ("memory", "bytes", 2.0**30, "GiB")):
        ratios = [one[f"omnigraph_{key}"] / one[f"loop_{key}"] for one in rounds]
        loop, own = (sum(one[f"{way}_{key}"] for one in rounds) / len(rounds) / scale for way in ("loop", "omnigraph"))
        how = f"loop {loop:.2f} {unit}, omnigraph {own:.2f} {unit}"
        found.append({"row": f"capture_{what}", "value": startup[f"{what}_ratio"], "low": min(ratios), "high": max(ratios), "how": how})
    return found


def ragged_row(ragged: Mapping[str, Any]) -> dict[str, Any]:
    row = compared("ragged", ("rounds", "packed"), ragged["loop"]["ms"], ragged["packed"]["ms"])
    calls = f"{ragged['loop']['replays']} and {ragged['packed']['replays']} replays"
    return {**row, "value": ragged["ratio"]["loop"], "how": f"{row['how']}, {calls}"}


def first_audio_row(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    first = {(row["way"], tuple(row["ramp"])): row["first_ms"] for row in rows}
    return compared("first_audio", ("eager", "graphs"), first["eager", ()], first["graphs", (5,)])


def latency_row(row: str, latency: Iterable[Mapping[str, Any]], shape: tuple[int, int]) -> dict[str, Any]:
    [found] = [one for one in latency if tuple(one["shape"]) == shape]
    return compared(row, ("eager", "decode"), found["eager_ms"], found["decode_ms"])


def table(rows: Iterable[Row], cuda: bool = True) -> list[dict[str, Any]]:
    """The project's table: what, measured, spread, target, predicted, verdict, how; a row for each bar, measured or not.

    Raises:
        ValueError: a row is of no bar, or there twice.
    """
    known, found = {bar.row for bar in BARS}, dict[str, Row]()
    for row in rows:
        if row["row"] not in known or row["row"] in found:
            raise ValueError(f"{row['row']!r} is {'there twice' if row['row'] in found else 'no row of the table'}")
        found[row["row"]] = row
    shown = []
    for bar in BARS:
        row = found.get(bar.row, {})
        predicted = row.get("predicted", bar.predicted)
        shown.append(
            {
                "what": bar.what,
                "measured": f"{row['value']:.3g}" if row else "",
                "spread": f"{row['low']:.3g} to {row['high']:.3g}" if row else "",
                "target": bar.limit,
                "predicted": "" if predicted is None else f"{predicted:.2g}",
                "verdict": bar.verdict(found.get(bar.row), cuda),
                "how": row.get("how", ""),
            }
        )
    return shown


def text(rows: Iterable[Row], device: str, cuda: bool = True) -> str:
    """The table in lines, for a terminal; a miss stands in capitals."""
    shown = table(rows, cuda)
    lines = [f"measured on {device}; the targets are an H200's", f"{'':>9}  {'spread':>16}  {'target':<14}  verdict"]
    for row in shown:
        verdict = row["verdict"].upper() if row["verdict"] == "missed" else row["verdict"]
        lines += [f"{row['what']}", f"{row['measured']:>9}  {row['spread']:>16}  {row['target']:<14}  {verdict:<12}  {row['how']}".rstrip()]
    verdicts = [row["verdict"] for row in shown]
    counts = ", ".join(f"{verdicts.count(kind)} {kind}" for kind in dict.fromkeys(verdicts))
    return "\n".join([*lines, counts])
