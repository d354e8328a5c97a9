"""Train the speech codec: `python data/models/speech_codec/train.py --minutes 8 [--fit 20]`, again to go on from the checkpoint.

Speech is read from build/speech/ (make_audio.py makes it; any of its shards will do), the checkpoint kept in build/speech_codec/: five
files of at most 16 MiB and log.jsonl. --fit says for how many minutes from now the training shall last, all runs together: it measures
some steps and sets how many there are in all, which the schedule of the learning rate and the start of the critics go by.
evaluate.py exports the weights.

A first phase has spectral losses alone, a second has critics besides; gradients of theirs are scaled to a part of the spectral one's.
The codebooks come in after some steps, set by k-means. Where a loss is not finite or explodes, training goes back to the last good
step and goes on with half the learning rate. Random numbers depend on the seed and the step alone, so a resumed run goes on as one
that was not interrupted would: a save rounds the optimiser's moments to bfloat16 in memory too.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speech import Speech
from trainer import SCHEMA, Config, Trainer

from omnigraph._files import read_json

ROOT = Path(__file__).parents[3]
NEVER = 10**9


def fit(config: Config, speech: Speech, device: torch.device, step: int, seconds: float) -> Config:
    """Set how many steps there are, so that those after `step` take `seconds`: half of the time with critics, if they are yet to come."""
    every = config.log_every
    plain, judged = (seconds_a_step(replace(config, quantise_from=0, adversarial_from=at), speech, device) for at in (NEVER, 0))
    seconds *= 0.92  # saving, evaluating
    if config.adversarial_from == NEVER:
        return replace(config, steps=(step + int(seconds / plain)) // every * every)
    if step >= config.adversarial_from:
        return replace(config, steps=(step + int(seconds / judged)) // every * every)
    from_step = (step + int(seconds * 0.5 / plain)) // every * every
    return replace(config, adversarial_from=from_step, steps=from_step + int(seconds * 0.5 / judged) // every * every)


def seconds_a_step(config: Config, speech: Speech, device: torch.device) -> float:
    trainer, times = Trainer(replace(config, save_every=10**9), speech, device), []
    for _ in range(12 if device.type == "cpu" else 60):
        started = time.perf_counter()
        trainer.advance()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return float(np.median(times[len(times) // 3 :]))


def run(trainer: Trainer, folder: Path, minutes: float, started: float, about: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Train until the time or the steps are over; yields what goes into the log."""
    c, since, at, best = trainer.config, time.perf_counter(), trainer.step, math.inf
    back = trainer.snapshot()
    while trainer.step < c.steps and (trainer.step % c.log_every or time.perf_counter() - started < 60 * minutes):
        trainer.advance()
        if trainer.step % c.log_every == 0:
            count = trainer.step - at
            means = {name: round(float(value) / count, 5) for name, value in trainer.sums.items()}
            trainer.sums, now = {}, time.perf_counter()
            line = {"step": trainer.step, **means, "rate": round(trainer.rate(), 4), "steps_a_second": round(count / (now - since), 3)}
            since, at = now, trainer.step
            if not all(map(math.isfinite, means.values())) or means["spectral"] > 2 * best + 0.5:
                back()
                trainer.slower, at, best = trainer.slower / 2, trainer.step, math.inf
                yield line | {"event": f"diverged: back to step {trainer.step}, the learning rate halved"}
                if trainer.slower < 1 / 32:
                    break
                continue
            best = min(best, means["spectral"])
            yield line
            if trainer.step % (10 * c.log_every) == 0:
                back = trainer.snapshot()
        if trainer.step % c.evaluate_every == 0:
            yield {"step": trainer.step, **trainer.held_out()}
            since = time.perf_counter()
        if trainer.step % c.save_every == 0:
            trainer.save(folder, about)
            since = time.perf_counter()
    yield {"step": trainer.step, **trainer.held_out(), "event": "done" if trainer.step >= c.steps else "out of time"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, default=ROOT / "build" / "speech")
    parser.add_argument("--checkpoint", type=Path, default=ROOT / "build" / "speech_codec")
    parser.add_argument("--minutes", type=float, default=8.0, help="of this run, start included")
    parser.add_argument("--fit", type=float, help="minutes that are left for all runs from now on")
    parser.add_argument("--config", type=json.loads, default={}, help="JSON: fields of Config that differ, for a first run")
    parser.add_argument("--no-critics", action="store_true", help="spectral losses alone, from now on")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="torch.compile encoder, decoder and critics")
    options = parser.parse_args()
    started, device, folder = time.perf_counter(), torch.device(options.device), options.checkpoint
    torch.backends.cudnn.benchmark = True
    state = read_json(folder / "state.json", SCHEMA) if (folder / "state.json").exists() else None
    if state and options.config:
        raise SystemExit(f"{folder} has a checkpoint with a config of its own")
    speech = Speech.load(options.speech, device)
    config = Config(**(state["config"] if state else options.config))
    if options.no_critics:
        config = replace(config, adversarial_from=NEVER)
    step = state["step"] if state else 0
    if options.fit:
        config = fit(config, speech, device, step, 60 * options.fit)
    trainer = Trainer(config, speech, device)
    if state:
        trainer.slower = state["slower"]
        trainer.load(folder, step)
    if options.compile:
        trainer.latents, trainer.synthesise = torch.compile(trainer.latents), torch.compile(trainer.synthesise)
        trainer.judge = torch.compile(trainer.judge)
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.jsonl"
    kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= step] if log.exists() and state else []
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    begin = {"step": step, "event": "start", "device": where, "torch": torch.__version__, "shards": speech.shards}
    begin |= {"hours": round(speech.hours, 3), "ready_seconds": round(time.perf_counter() - started, 1), "config": asdict(config)}
    with log.open("w") as file:
        file.writelines(f"{line}\n" for line in kept)
        about = {"device": where, "torch": torch.__version__}
        for line in chain([begin], run(trainer, folder, options.minutes, started, about)):
            text = json.dumps({**line, "seconds": round(time.perf_counter() - started, 1)})
            print(text, file=file, flush=True)
            print(text, flush=True)
    trainer.save(folder, about)


if __name__ == "__main__":
    main()
