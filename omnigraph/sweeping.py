"""Profile a grid of models, dtypes and shapes, here or on the workers of any `concurrent.futures` executor."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

import torch

from omnigraph._files import FileError, write_text
from omnigraph._needs import need
from omnigraph.profile import Profile

if TYPE_CHECKING:
    import pandas as pd

SCHEMA = "omnigraph.sweep/1"
ATTEMPTS = 2

Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One profile to measure.

    Args:
        model: a name in `omnigraph.models`, "package.module:factory", or a function that other processes can import.
        shapes: (batch, frames) of the calls to time.
        dtype: name of a torch dtype, such as "bfloat16"; None: as the factory makes it.
        device: None: CUDA where there is one.
        kwargs: for the factory.
        measure: further arguments of `Profile.measure`.

    Raises:
        ValueError: no such dtype, or a model that has no name.
    """

    model: str | Callable[..., torch.nn.Module]
    shapes: Sequence[tuple[int, int]]
    dtype: str | None = None
    device: str | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    measure: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.dtype is not None and not isinstance(getattr(torch, self.dtype, None), torch.dtype):
            raise ValueError(f"expected the name of a torch dtype, such as 'bfloat16', got {self.dtype!r}")
        if not isinstance(self.model, str) and not hasattr(self.model, "__qualname__"):
            raise ValueError(f"expected a name or a function, got {self.model!r}: write a function that makes the model")

    @property
    def name(self) -> str:
        return self.model if isinstance(self.model, str) else f"{self.model.__module__}:{self.model.__qualname__}"

    @property
    def key(self) -> str:
        """What tells this job from others, in one line: a results file knows it by that."""
        about = {"model": self.name, "dtype": self.dtype, "device": self.device, "kwargs": dict(self.kwargs), "measure": dict(self.measure)}
        return json.dumps({**about, "shapes": sorted(map(list, self.shapes))}, sort_keys=True, default=str)


class _Done(NamedTuple):
    """How a job ended: its rows, or the error of its last attempt."""

    rows: list[Row]
    error: str | None
    attempts: int


def load_model(name: str, **kwargs: Any) -> torch.nn.Module:
    """Build a model by name: one of `omnigraph.models`, or "package.module:factory".

    Raises:
        ValueError: there is no such factory, or what it returns is no module.
    """
    package, _, factory = name.rpartition(":")
    try:
        make = getattr(import_module(package or "omnigraph.models"), factory)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"expected a name in omnigraph.models or package.module:factory, got {name!r}: {error}") from error
    module = make(**kwargs)
    if not isinstance(module, torch.nn.Module):
        raise ValueError(f"{name} returned a {type(module).__name__}, expected a torch.nn.Module")
    return module


def profile_job(job: Job) -> list[Row]:
    """Build the job's model, measure it, and give the rows of its profile; a graph that could not be made is a row with its error."""
    module = load_model(job.model, **job.kwargs) if isinstance(job.model, str) else job.model(**job.kwargs)
    module = module.to(device=job.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if job.dtype is not None:
        module = module.to(dtype=getattr(torch, job.dtype))
    profile = Profile.measure(module, job.shapes, **{"progress": False, **job.measure})
    about = {"device": profile.made_for["device"], "dtype": profile.made_for["dtype"]}
    rows: list[Row] = [about | {str(k): v for k, v in row.items()} for row in profile.to_frame().to_dict("records")]
    for bucket, error in profile.failed.items():
        shape, _, compiled = bucket.partition(" ")
        batch, frames = map(int, shape.split("x"))
        rows.append({**about, "batch": batch, "frames": frames, "how": compiled or "plain", "error": error})
    return rows


def sweep(
    jobs: Sequence[Job],
    executor: Executor | None = None,
    *,
    run: Callable[[Job], list[Row]] = profile_job,
    results: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> pd.DataFrame:
    """Run `jobs` and return one table: model, kwargs, dtype and what `run` gives (by default the points of the job's profile), and error.

    In this process one after the other, or through any `concurrent.futures` executor. A job that fails, or whose worker is lost,
    is tried once more; then it is a row with its `error`. (A process pool that loses a worker is broken for good: all that it had
    left become such rows, and the next run does them.) `results` is a file to which each job is written as it ends; a second run
    with it does only what is missing or failed.

    On several GPUs or machines, the engine is dask.distributed's, with one worker of one thread for each GPU, pinned by
    CUDA_VISIBLE_DEVICES. On one machine, here with two::

        from dask.distributed import Client, Nanny, Scheduler, SpecCluster

        def worker(gpu):
            return {"cls": Nanny, "options": {"host": "127.0.0.1", "nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": str(gpu)}}}

        scheduler = {"cls": Scheduler, "options": {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"}}
        with SpecCluster({gpu: worker(gpu) for gpu in range(2)}, scheduler) as cluster, Client(cluster) as client:
            og.sweep(jobs, client.get_executor(), results="sweep.jsonl")

    Without GPUs `LocalCluster(n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None)` will do; on several
    machines start `CUDA_VISIBLE_DEVICES=0 dask worker tcp://...:8786 --nthreads 1 --nworkers 1` for each GPU. dask itself moves the
    job of a lost worker to another one, and gives it up after `distributed.scheduler.allowed-failures` losses.

    Raises:
        ValueError: a job is listed twice.
        FileError: `results` is no file of a sweep.
    """
    keys = [job.key for job in jobs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"a job is listed more than once: {twice[0]}")
    path = None if results is None else Path(results)
    done = {} if path is None else _read(path)
    missing = [job for job, key in zip(jobs, keys, strict=True) if key not in done or done[key].error]
    bar = need("tqdm.auto").tqdm(total=len(jobs), initial=len(jobs) - len(missing), disable=not progress, unit="job")
    with bar, closing(_here(missing, run) if executor is None else _through(executor, missing, run)) as ended:
        for job, end in ended:
            done[job.key] = end
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("a", encoding="utf-8", newline="\n") as file:
                    file.write(json.dumps({"schema": SCHEMA, "job": job.key, **end._asdict()}, allow_nan=False) + "\n")
            bar.set_postfix_str(f"{job.name}: {end.error}" if end.error else job.name)
            bar.update()
    rows = []
    for job, key in zip(jobs, keys, strict=True):
        end = done[key]
        about = {"model": job.name, "kwargs": ", ".join(f"{k}={v}" for k, v in job.kwargs.items()), "dtype": job.dtype}
        rows += [{**about, **row, "error": end.error or row.get("error")} for row in end.rows or [{}]]
    frame: pd.DataFrame = need("pandas").DataFrame(rows)
    return frame


def _attempt(run: Callable[[Job], list[Row]], job: Job, ticket: str) -> list[Row]:
    """Run a job. Each attempt has a `ticket`: dask gives a call with equal arguments the outcome of the earlier one."""
    return [{name: _plain(value) for name, value in row.items()} for row in run(job)]


def _plain(value: Any) -> Any:
    """As JSON has it: numpy's numbers are Python's, and what is no number is None."""
    value = value.item() if hasattr(value, "item") else value
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _failed(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _here(jobs: Sequence[Job], run: Callable[[Job], list[Row]]) -> Generator[tuple[Job, _Done], None, None]:
    for job in jobs:
        for attempt in range(1, ATTEMPTS + 1):
            try:
                end = _Done(_attempt(run, job, ""), None, attempt)
                break
            except Exception as error:
                end = _Done([], _failed(error), attempt)
        yield job, end


def _through(executor: Executor, jobs: Sequence[Job], run: Callable[[Job], list[Row]]) -> Generator[tuple[Job, _Done], None, None]:
    def start(job: Job) -> Future[list[Row]]:
        try:
            return executor.submit(_attempt, run, job, uuid4().hex)
        except BrokenExecutor as error:
            lost = Future[list[Row]]()
            lost.set_exception(error)
            return lost

    running = {start(job): (job, 1) for job in jobs}
    try:
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                job, attempt = running.pop(future)
                try:
                    end = _Done(future.result(), None, attempt)
                except Exception as error:
                    if attempt < ATTEMPTS:
                        running[start(job)] = (job, attempt + 1)
                        continue
                    end = _Done([], _failed(error), attempt)
                yield job, end
    finally:
        for future in running:
            future.cancel()


def _read(path: Path) -> dict[str, _Done]:
    """The jobs that a file holds, each as it ended last; a line cut short at its end (an interrupted write) is taken off."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    done = {}
    try:
        for line in whole.splitlines():
            entry = json.loads(line)
            if entry["schema"] != SCHEMA:
                raise ValueError(f"found the schema {entry['schema']!r}")
            done[entry["job"]] = _Done(entry["rows"], entry["error"], entry["attempts"])
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: expected lines of the schema {SCHEMA!r}: {error!r}") from error
    if whole != text:
        write_text(path, whole)
    return done
