"""The panel itself: fields make a `State`, a thread makes figures of the latest one, and buttons do things to the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from html import escape
from threading import Event
from typing import Any

import ipywidgets as w

from omnigraph._debounce import Latest
from omnigraph._panel_controls import Controls, text_of
from omnigraph._panel_fields import BAD, Bar, dispose
from omnigraph._panel_jobs import Applied, Cancelled, Player, apply, measure, own_grad_mode
from omnigraph._panel_plots import Plots
from omnigraph._panel_state import State, calls_of
from omnigraph._panel_views import COSTS, HITS, LIVE, LOAD, MEASURED, Look, Views
from omnigraph.decoder import GraphedDecoder
from omnigraph.profile import Profile
from omnigraph.shapes import BucketPlan
from omnigraph.trace import Trace

Job = Callable[[], str]  # does something to the decoder and says what came of it


class Panel:
    """What `explore` returns; a cell that ends with it shows it. Buttons and methods do the same.

    `look` is what the panel shows: its `plan`, `prediction` and `figures`. Callbacks only note what was entered and may run on any
    thread; figures are made on one thread of the panel's, what is done to the decoder on another.
    """

    def __init__(self, decoder: GraphedDecoder | None, trace: Trace | None, profile: Profile | None) -> None:
        self.closed = False
        self.look: Look | None = None
        self.controls = Controls(decoder, trace, profile, self._changed)
        self._views, self._cancel = Views(decoder), Event()
        self._looking: Latest[State] = Latest(self._look, self._failed)
        self._jobs: Latest[Job] = Latest(self._work, self._refuse)
        self._bar, self._job_bar = Bar(), Bar()
        self._message, self._summary, self._error, self._played = w.HTML(), w.HTML(), w.HTML(), w.HTML()
        self.plots = Plots()
        views = [HITS, COSTS, LOAD, *([LIVE, MEASURED] if decoder is not None else [])]
        self.view = w.ToggleButtons(options=views, value=HITS, style={"button_width": "auto"})
        self.view.observe(lambda _: self._changed(), "value")
        self.path = w.Text("plan.json", description="File", style={"description_width": "initial"}, layout=w.Layout(width="220px"))
        self.buttons = {
            name: w.Button(description=name, tooltip=tip, button_style=style, layout=w.Layout(width="auto"))
            for name, tip, style in (
                ("Apply", "capture this plan in the decoder, then time calls of the trace", "primary"),
                ("Cancel", "stop what is under way; the decoder keeps what it had", "warning"),
                ("Measure now", "measure the decoder's times on this device", ""),
                ("Play", "decode the trace when its requests arrive, at the load set", ""),
                ("Export", "write the plan to the file", ""),
                ("Close", "close the panel and free what it holds", ""),
            )
        }
        for name, do in (
            ("Apply", self.apply),
            ("Cancel", self.cancel),
            ("Measure now", self.measure),
            ("Play", self._play_or_stop),
            ("Export", self.export),
            ("Close", self.close),
        ):
            self.buttons[name].on_click(self._guarded(do))
        self.buttons["Cancel"].disabled = True
        live = ["Apply", "Cancel", "Measure now", "Play"] if decoder is not None else []
        row = w.HBox(
            [*(self.buttons[name] for name in live), self.path, self.buttons["Export"], self.buttons["Close"]],
            layout=w.Layout(flex_flow="row wrap", align_items="center", margin="6px 0"),
        )
        shown = w.HBox([self.view, self._bar.box], layout=w.Layout(flex_flow="row wrap", align_items="center"))
        parts = [self.controls.box, row, self._job_bar.box, self._message, self._error, self._summary, shown]
        self.root = w.VBox([*parts, self._played, self.plots], layout=w.Layout(width="100%"))
        self.root.add_class("omnigraph-panel")
        self._changed()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return {"text/plain": "a closed panel"} if self.closed else self.root._repr_mimebundle_(**options)

    @property
    def decoder(self) -> GraphedDecoder | None:
        return self._views.decoder

    @property
    def player(self) -> Player | None:
        """What plays the trace, or played it last."""
        return self._views.player

    @property
    def applied(self) -> list[Applied]:
        """What came of each plan applied, the latest last."""
        return self._views.applied

    def state(self) -> State:
        """What the fields say now."""
        return self.controls.state(self.view.value)

    def set(self, **entries: Any) -> None:
        """Enter values into fields, as a user would: trace, chunk, context, ramp, load, batch, preset, graphs, mib, batches, sizes, ...

        Raises:
            ValueError: there is no such field, or the entry is refused, and why.
        """
        for name, entry in entries.items():
            if name not in self.controls.fields:
                raise ValueError(f"there is no field {name!r}: there are {', '.join(self.controls.fields)}")
            field = self.controls.fields[name]
            field.read(entry)
            field.control.value = entry

    def settled(self, timeout: float | None = 60.0) -> Look:
        """Wait until the panel shows what the fields say, and nothing is under way.

        Raises:
            TimeoutError: it takes longer than `timeout` seconds.
        """
        if not (self._jobs.idle(timeout) and self._looking.idle(timeout)) or self.look is None:
            raise TimeoutError(f"the panel was still at work after {timeout} s, or could not draw: {self._error.value}")
        return self.look

    # What buttons do

    def apply(self, plan: BucketPlan | None = None) -> None:
        """Capture the plan that is shown, or `plan`, and time some calls; returns at once. `cancel` stops it."""
        decoder = self._decoder()
        if plan is not None:
            batches = tuple(sorted({bucket.shape.batch for bucket in plan.buckets}))
            self.controls.fields["batches"].show([*map(str, batches)])
            self.controls.show_plan(plan, batches)
            self.controls.fields["compiled"].show([*map(str, plan.compiled)])
            self.controls.fields["preset"].show("by hand")
            self._changed()
        state = self.state()

        def job() -> str:
            look = self._current()
            if look.plan is None:
                raise ValueError("this plan has no bucket: there is nothing to capture")
            done = apply(decoder, look.plan, state.wish.padding, look.calls, self._progress)
            self.applied.append(done)
            self.view.value = MEASURED
            timed = f"{done.driven.calls} calls timed" if done.driven else done.problem
            return f"Applied: {str(done.report).splitlines()[0]}; {timed}.{self._failures(done)}"

        self._begin(job)

    def measure(self) -> None:
        """Measure the decoder at the shapes that matter here, and use that profile; returns at once. `cancel` stops it."""
        decoder, state = self._decoder(), self.state()
        plan = self.look.plan if self.look is not None else None

        def job() -> str:
            profile = measure(decoder, calls_of(state.traffic, state.profile), plan, self._progress)
            self._views.measured_here = profile
            self.controls.add_profile(profile)
            return f"Measured: {len(profile.eager)} shapes eagerly, {len(profile.plain)} by replay."

        self._begin(job)

    def cancel(self) -> None:
        """Stop applying or measuring: the decoder keeps the graphs that it had."""
        self._cancel.set()

    def play(self, speed: float | None = None) -> Player:
        """Decode the trace when its requests arrive, `speed` times as fast (None: the load that is set), until `stop`."""
        decoder, traffic = self._decoder(), self.state().traffic
        self.stop()
        player = Player(
            decoder,
            traffic.trace,
            chunk_size=traffic.chunk_size,
            left_context_size=traffic.left_context_size,
            ramp=traffic.ramp,
            speed=speed or traffic.load,
            watched=self._heard,
        )
        self._views.player = player.start()
        self.buttons["Play"].description = "Stop"
        self.view.value = LIVE
        return player

    def stop(self) -> None:
        """Play no further calls."""
        if self.player is not None:
            self.player.stop()
            self._heard(None)

    def export(self, path: str | None = None) -> None:
        """Write the plan that is shown to a file, by default the one that is named in the panel."""
        look = self._current()
        if look.plan is None:
            raise ValueError("this plan has no bucket: there is nothing to write")
        made_for = look.state.profile.made_for if look.state.profile is not None else {}
        plan = replace(look.plan, made_for=dict(made_for))
        written = plan.save(path or self.path.value).resolve()
        self._say(f"Written: {written} ({len(plan)} buckets).")

    def close(self) -> None:
        """Stop all work, close all widgets, and let go of decoder, trace and profile. The decoder itself stays open."""
        if self.closed:
            return
        self.closed = True
        self._cancel.set()
        if self.player is not None:
            self.player.stop()
        self._jobs.close(30)
        self._looking.close(30)
        dispose(self.root)
        for button in self.buttons.values():  # those that are not shown as well
            dispose(button)
        self._views, self.look = Views(None), None
        self.controls.known.clear()
        self.controls.fields.clear()

    # What happens on other threads

    def _look(self, state: State, overtaken: Callable[[], bool]) -> None:
        try:
            with own_grad_mode():
                look = self._views.look(state, overtaken, self._bar.show)
        finally:
            self._bar.hide()
        if overtaken():
            return
        if state.wish.preset != "by hand":
            self.controls.show_plan(look.plan, state.wish.batch_sizes)
        self.look = look
        self._summary.value = look.summary or "No times yet: <b>Measure now</b>, or choose a device profile."
        self._played.value = self._views.live_table() if state.view == LIVE else ""
        self._error.value = ""
        if not look.figures:
            hint = "Play the trace to see its calls" if state.view == LIVE else "Apply a plan to see what it measures"
            self._played.value = self._played.value or f"<i>{hint}.</i>"
        self.plots.show(look.figures)

    def _work(self, job: Job, overtaken: Callable[[], bool]) -> None:
        try:
            self._say(job())
        except Cancelled:
            self._say("Cancelled: the decoder keeps what it had.")
        finally:
            self._job_bar.hide()
            for name, button in self.buttons.items():
                button.disabled = name == "Cancel"
            self._changed()

    def _begin(self, job: Job) -> None:
        self._cancel.clear()
        self._say("")
        for name, button in self.buttons.items():
            button.disabled = name in ("Apply", "Measure now")
        self._job_bar.show("starting", 0, 1)
        self._jobs.submit(job)

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._cancel.is_set():
            raise Cancelled
        self._job_bar.show(what, done, total)

    def _heard(self, error: BaseException | None) -> None:
        """The player has news."""
        if self.closed:
            return
        if error is not None:
            self._refuse(error)
        if self.player is not None and not self.player.playing:
            self.buttons["Play"].description = "Play"
        if self.view.value == LIVE:
            self._changed()

    def _play_or_stop(self) -> None:
        if self.player is not None and self.player.playing:
            self.stop()
        else:
            self.play()

    def _current(self) -> Look:
        """What is shown, once it is what the fields say."""
        done, now, look = self._looking.idle(60), self.state(), self.look
        if not done or look is None or (look.state.traffic, look.state.wish) != (now.traffic, now.wish):
            raise ValueError("what is entered could not be predicted: see the reason above the figures")
        return look

    def _changed(self) -> None:
        if not self.closed:
            self._looking.submit(self.state())

    def _failed(self, error: BaseException) -> None:
        self._error.value = f'<div style="{BAD}"><b>{text_of(error)}</b></div>'

    def _refuse(self, error: BaseException) -> None:
        self._message.value = f'<div style="{BAD}"><b>{text_of(error)}</b></div>'

    def _say(self, text: str) -> None:
        self._message.value = f'<div style="line-height:1.3">{escape(text)}</div>' if text else ""

    def _guarded(self, do: Callable[[], object]) -> Callable[[Any], None]:
        """A button's callback: its errors are shown in the panel."""

        def clicked(_: Any) -> None:
            try:
                do()
            except Exception as error:
                self._refuse(error)

        return clicked

    @staticmethod
    def _failures(done: Applied) -> str:
        return "".join(f" {row.bucket}: {row.error}." for row in done.report.failed) + (f" {done.report.note}." if done.report.note else "")

    def _decoder(self) -> GraphedDecoder:
        if self.closed:
            raise ValueError("this panel is closed: make another with og.explore")
        if self.decoder is None:
            raise ValueError("there is no decoder to do this with: give one to og.explore")
        return self.decoder
