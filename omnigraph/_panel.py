"""The panel itself: fields make a `State`, a thread makes figures of the latest one, and buttons do things to the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from threading import Event
from typing import Any

from omnigraph._debounce import Latest
from omnigraph._panel_controls import Controls
from omnigraph._panel_drawn import live_table
from omnigraph._panel_frame import Frame
from omnigraph._panel_jobs import Applied, Cancelled, Player, apply, measure, own_grad_mode
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
        self._looking: Latest[State] = Latest(self._look, lambda error: self.frame.fail(error))
        self._jobs: Latest[Job] = Latest(self._work, lambda error: self.frame.refuse(error))
        views = [HITS, COSTS, LOAD, *([LIVE, MEASURED] if decoder is not None else [])]
        self.frame = Frame(self.controls.box, views, decoder is not None)
        self.frame.view.observe(lambda _: self._changed(), "value")
        for name, do in (
            ("Apply", self.apply),
            ("Cancel", self.cancel),
            ("Measure now", self.measure),
            ("Play", self._play_or_stop),
            ("Export", self.export),
            ("Close", self.close),
        ):
            self.frame.on_click(name, do)
        self._changed()

    def _repr_mimebundle_(self, **options: Any) -> Any:
        return {"text/plain": "a closed panel"} if self.closed else self.frame.root._repr_mimebundle_(**options)

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
        return self.controls.state(self.frame.view.value)

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
            raise TimeoutError(f"the panel was still at work after {timeout} s, or could not draw: {self.frame.error.value}")
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
            self.frame.view.value = MEASURED
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
        self.frame.buttons["Play"].description = "Stop"
        self.frame.view.value = LIVE
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
        written = plan.save(path or self.frame.path.value).resolve()
        self.frame.say(f"Written: {written} ({len(plan)} buckets).")

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
        self.frame.close()
        self._views, self.look = Views(None), None
        self.controls.known.clear()
        self.controls.fields.clear()

    # What happens on other threads

    def _look(self, state: State, overtaken: Callable[[], bool]) -> None:
        try:
            with own_grad_mode():
                look = self._views.look(state, overtaken, self.frame.bar.show)
        finally:
            self.frame.bar.hide()
        if overtaken():
            return
        if state.wish.preset != "by hand":
            self.controls.show_plan(look.plan, state.wish.batch_sizes)
        self.look = look
        played = live_table(self._views.player) if state.view == LIVE else ""
        if not look.figures:
            hint = "Play the trace to see its calls" if state.view == LIVE else "Apply a plan to see what it measures"
            played = played or f"<i>{hint}.</i>"
        self.frame.figures(look.summary or "No times yet: <b>Measure now</b>, or choose a device profile.", played, look.figures)

    def _work(self, job: Job, overtaken: Callable[[], bool]) -> None:
        try:
            self.frame.say(job())
        except Cancelled:
            self.frame.say("Cancelled: the decoder keeps what it had.")
        finally:
            self.frame.busy(False)
            self._changed()

    def _begin(self, job: Job) -> None:
        self._cancel.clear()
        self.frame.say("")
        self.frame.busy(True)
        self.frame.job_bar.show("starting", 0, 1)
        self._jobs.submit(job)

    def _progress(self, what: str, done: int, total: int) -> None:
        if self._cancel.is_set():
            raise Cancelled
        self.frame.job_bar.show(what, done, total)

    def _heard(self, error: BaseException | None) -> None:
        """The player has news."""
        if self.closed:
            return
        if error is not None:
            self.frame.refuse(error)
        if self.player is not None and not self.player.playing:
            self.frame.buttons["Play"].description = "Play"
        if self.frame.view.value == LIVE:
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

    @staticmethod
    def _failures(done: Applied) -> str:
        return "".join(f" {row.bucket}: {row.error}." for row in done.report.failed) + (f" {done.report.note}." if done.report.note else "")

    def _decoder(self) -> GraphedDecoder:
        if self.closed:
            raise ValueError("this panel is closed: make another with og.explore")
        if self.decoder is None:
            raise ValueError("there is no decoder to do this with: give one to og.explore")
        return self.decoder
