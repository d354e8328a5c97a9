"""The panel's fields: what can be set, how each entry is read, and the `State` that all of them make."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as w

from omnigraph._panel_fields import Field, titled
from omnigraph._panel_state import (
    LARGEST,
    SEARCHED,
    State,
    Traffic,
    Wish,
    read_mib,
    read_numbers,
    read_shape,
    read_size,
    read_whole,
    tags_of,
)
from omnigraph.decoder import GraphedDecoder
from omnigraph.profile import Profile
from omnigraph.shapes import BucketPlan
from omnigraph.trace import Trace

NO_TIMES = "none yet: Measure now"


def shipped(kind: str, pattern: str) -> list[Path]:
    """The files of `data/<kind>/`, beside the package or above where the notebook runs."""
    places = [Path.cwd(), *Path.cwd().parents[:2], Path(__file__).parents[1]]
    return next((found for place in places if (found := sorted((place / "data" / kind).glob(pattern)))), [])


def _batches(tags: list[str]) -> tuple[int, ...]:
    if not tags:
        raise ValueError("a plan needs at least one batch size")
    return read_numbers(tags, "a batch size", LARGEST)


def _compiles(profile: Profile | None, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    if shapes and profile is not None and not profile.compiled:
        raise ValueError("the device profile has no compiled times: nothing could be predicted")
    return shapes


def _pads(decoder: GraphedDecoder | None, padding: str) -> str:
    if padding == "allow" and decoder is not None and not (decoder.facts.causal and decoder.facts.rows_independent):
        raise ValueError("padding would change samples of this decoder: it looks ahead or mixes rows")
    return padding


class Controls:
    """All fields, by name. `changed` is called when one of them has another value, by the user's doing."""

    def __init__(self, decoder: GraphedDecoder | None, trace: Trace | None, profile: Profile | None, changed: Callable[[], object]) -> None:
        self.traces = {path.stem: path for path in shipped("traces", "*.csv")}
        self.profiles = {path.stem: path for path in shipped("profiles", "*.json")}
        self.known: dict[str, Trace | Profile | None] = {}
        first = self._first_trace(trace)
        times = [NO_TIMES] if decoder is not None else []
        if profile is not None:
            times = [f"{profile.made_for.get('device', 'a device')}, {profile.made_for.get('dtype', '')} (given)"]
            self.known[times[0]] = profile
        plan = decoder.plan if decoder is not None else None
        batches = sorted({b.shape.batch for b in plan.buckets}) if plan else [1]
        sizes, compiled = tags_of(plan, batches) if plan else ([], [])
        preset = "by hand" if plan else "chunking heuristic"

        def tags(value: list[str]) -> Any:
            return w.TagsInput(value=value, allow_duplicates=False, layout=w.Layout(border="1px solid #ccc", min_height="32px"))

        def field(name: str, control: Any, label: str, hint: str, read: Callable[[Any], Any] = lambda value: value) -> Field:
            made = self.fields[name] = Field(control, label, hint, read, changed)
            return made

        def edited() -> None:
            self.fields["preset"].show("by hand")
            changed()

        def by_hand(name: str, control: Any, label: str, hint: str, read: Callable[[Any], Any]) -> Field:
            made = self.fields[name] = Field(control, label, hint, read, edited)
            return made

        self.fields: dict[str, Field] = {}
        self.upload = w.FileUpload(accept=".csv", description="Upload a CSV")
        self.upload.observe(self._uploaded, "value")
        self.changed = changed
        names = [*dict.fromkeys([first, *self.traces])]
        profiles = [*times, *self.profiles]
        text = {"continuous_update": False}
        self.box = w.GridBox(
            [
                titled(
                    "Traffic",
                    field("trace", w.Dropdown(options=names, value=first), "Trace", "requests: arrival, frames", self._trace).box,
                    self.upload,
                    field("chunk", w.Text("25", **text), "Chunk", "new frames a call", lambda t: read_whole(t, "a chunk", 1, 10_000)).box,
                    field(
                        "context",
                        w.Text("25", **text),
                        "Left context",
                        "frames decoded again before each chunk",
                        lambda t: read_whole(t, "a left context", 0, 10_000),
                    ).box,
                    field(
                        "ramp",
                        w.Text("", placeholder="4, 8, 16", **text),
                        "Ramp",
                        "sizes of the first chunks; empty: none",
                        lambda t: read_numbers(t.replace(",", " ").split(), "a chunk of the ramp", 10_000),
                    ).box,
                    field(
                        "load",
                        w.FloatLogSlider(1.0, base=2, min=-3, max=5, step=0.25, readout_format=".2f"),
                        "Load",
                        "times the trace's pace",
                    ).box,
                    field("batch", w.IntSlider(1, 1, 16), "Batching", "waiting chunks that one call may take").box,
                ),
                titled(
                    "Buckets",
                    field(
                        "preset",
                        w.Dropdown(options=["by hand", "chunking heuristic", "powers of two", *SEARCHED], value=preset),
                        "Preset",
                        "who picks the buckets; edit them below: by hand",
                    ).box,
                    field("graphs", w.IntSlider(4, 1, 64), "Graphs", "of the preset best for so many graphs").box,
                    field("mib", w.Text("256", **text), "Memory, MiB", "of the preset best for so much memory", read_mib).box,
                    field("batches", tags([*map(str, batches)]), "Batch sizes", "rows of a call; click to add", _batches).box,
                    by_hand(
                        "sizes",
                        tags(sizes),
                        "Bucket sizes",
                        "frames, at every batch size, or 4x50 alone; click to add",
                        lambda t: tuple(map(read_size, t)),
                    ).box,
                ),
                titled(
                    "Capture",
                    field(
                        "compiled",
                        tags(compiled),
                        "Compiled shapes",
                        "as in 1x25; torch.compile first takes seconds each",
                        lambda t: _compiles(self.profile, tuple(map(read_shape, t))),
                    ).box,
                    field(
                        "padding",
                        w.Dropdown(options=["auto", "exact", "allow"], value="auto" if decoder is None else decoder.padding),
                        "Padding",
                        "auto: where it is safe; exact: never; allow: insist",
                        lambda p: _pads(decoder, p),
                    ).box,
                    field(
                        "profile",
                        w.Dropdown(options=profiles, value=profiles[0] if profiles else None),
                        "Device profile",
                        "whose times",
                        self._profile,
                    ).box,
                ),
            ],
            layout=w.Layout(grid_template_columns="repeat(auto-fit, minmax(min(260px, 100%), 1fr))", width="100%"),
        )

    def _first_trace(self, trace: Trace | None) -> str:
        if trace is None and self.traces:
            return next(iter(self.traces))
        given = Trace.synthesise() if trace is None else trace
        self.traces.pop(given.name, None)  # the one given, not the file of that name
        self.known[f"trace {given.name}"] = given
        return given.name

    def _trace(self, name: str) -> Trace:
        found: Trace = self._load(f"trace {name}", lambda: Trace.load(self.traces[name]))
        return found

    def _profile(self, name: str | None) -> Profile | None:
        return None if name in (None, NO_TIMES) else self._load(str(name), lambda: Profile.load(self.profiles[str(name)]))

    def _load(self, key: str, load: Callable[[], Any]) -> Any:
        if key not in self.known:
            self.known[key] = load()
        return self.known[key]

    def _uploaded(self, change: dict[str, Any]) -> None:
        """Read the file that was uploaded and choose it; what is wrong with it is said beside the trace."""
        for file in change["new"]:
            name = Path(str(file["name"]).replace("\\", "/")).name or "uploaded.csv"
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / name
                path.write_bytes(bytes(file["content"]))
                try:
                    trace = Trace.load(path)
                except Exception as error:
                    self.fields["trace"].refuse(str(error).replace(f"{folder}/", ""))
                    continue
            label = f"{trace.name} (uploaded)"
            while f"trace {label}" in self.known:
                label = f"{label[:-1]} again)"
            self.known[f"trace {label}"] = trace
            self._choose("trace", label)

    def _choose(self, name: str, label: str) -> None:
        """Add an option to a dropdown and take it, as if the user had."""
        control = self.fields[name].control
        control.options = [*dict.fromkeys([*control.options, label])]  # takes the first option, for a moment
        control.value = label

    def add_profile(self, profile: Profile) -> None:
        """Take a profile that was just measured."""
        label = f"measured here, {profile.provenance.get('date', 'now')}"
        self.known[label] = profile
        self._choose("profile", label)

    @property
    def profile(self) -> Profile | None:
        found: Profile | None = self.fields["profile"].value if "profile" in self.fields else None
        return found

    def state(self, view: str) -> State:
        """What the fields say now."""
        value = {name: field.value for name, field in self.fields.items()}
        traffic = Traffic(value["trace"], value["chunk"], value["context"], value["ramp"], round(value["load"], 4), value["batch"])
        sizes = value["sizes"] if value["preset"] == "by hand" else ()  # else they are what came of the preset
        wish = Wish(value["preset"], value["graphs"], value["mib"], value["batches"], sizes, value["compiled"], value["padding"])
        return State(traffic, wish, value["profile"], view)

    def show_plan(self, plan: BucketPlan | None, batch_sizes: tuple[int, ...]) -> None:
        """Put a preset's plan into the tags, to be edited from there."""
        self.fields["sizes"].show(tags_of(plan, batch_sizes)[0])


def text_of(error: BaseException) -> str:
    """An error for the panel."""
    return escape(str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}")
