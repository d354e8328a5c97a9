"""`sweep` in this process, in pools, and on a dask cluster that loses a worker; the file it writes, and taking it up again."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from omnigraph._files import FileError
from omnigraph.models import tiny
from omnigraph.sweeping import Job, load_model, profile_job, sweep

KILLED = {"distributed.scheduler.allowed-failures": 0}  # dask gives a job up at its first loss


def size(job):
    """A run that other processes can import: a row a shape, and what the kwargs ask for."""
    asked = dict(job.kwargs)
    if "log" in asked:
        with Path(asked["log"]).open("a") as file:
            file.write(f"{asked['n']} {os.getpid()}\n")
    if asked.get("fails") and len(lines(asked["log"], asked["n"])) <= asked["fails"]:
        raise RuntimeError("not now")
    if asked.get("waits") and len(lines(asked["log"], asked["n"])) == 1:
        time.sleep(60)
    if asked.get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    where = {"pid": os.getpid(), "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    return [{"batch": batch, "frames": frames, "work": batch * frames, **where} for batch, frames in job.shapes]


def lines(path, n):
    return [line for line in Path(path).read_text().splitlines() if line.startswith(f"{n} ")]


def jobs_of(n, log=None, **special):
    """Jobs 0 to n - 1; `special` gives some of them more kwargs: j1={"fails": 1}."""
    common = {} if log is None else {"log": str(log)}
    return [Job("m", [(k + 1, 5), (1, 25)], kwargs={"n": k, **common, **special.get(f"j{k}", {})}) for k in range(n)]


@pytest.fixture(scope="module")
def cluster():
    """A client of two workers, started and pinned as the docstring of `sweep` says."""
    dask = pytest.importorskip("dask")
    distributed = pytest.importorskip("dask.distributed")

    def worker(gpu):
        return {"cls": distributed.Nanny, "options": {"host": "127.0.0.1", "nthreads": 1, "env": {"CUDA_VISIBLE_DEVICES": str(gpu)}}}

    scheduler = {
        "cls": distributed.Scheduler,
        "options": {"host": "127.0.0.1", "dashboard": False, "dashboard_address": "127.0.0.1:0"},
    }
    with (
        dask.config.set(KILLED),
        distributed.SpecCluster({gpu: worker(gpu) for gpu in range(2)}, scheduler) as cluster,
        distributed.Client(cluster) as client,
    ):
        client.wait_for_workers(2)
        yield client


def test_rows_of_all_jobs_in_their_order(capsys):
    table = sweep(jobs_of(3), run=size)
    assert table["work"].tolist() == [5, 25, 10, 25, 15, 25]
    assert table["kwargs"].tolist() == ["n=0"] * 2 + ["n=1"] * 2 + ["n=2"] * 2
    assert table["error"].isna().all()
    assert "3/3" in capsys.readouterr().err
    sweep(jobs_of(1), run=size, progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kind", ["here", "threads", "processes", "dask"])
def test_a_failed_job_is_tried_once_more_and_then_a_row_with_its_error(kind, tmp_path, request):
    log, results = tmp_path / "log", tmp_path / "new folder" / "sweep.jsonl"
    jobs = jobs_of(4, log, j1={"fails": 1}, j2={"fails": 2})
    pools = {
        "here": lambda: None,
        "threads": lambda: ThreadPoolExecutor(2),
        "processes": lambda: ProcessPoolExecutor(2, mp_context=get_context("spawn")),
        "dask": lambda: request.getfixturevalue("cluster").get_executor(),
    }
    pool = pools[kind]()
    table = sweep(jobs, pool, run=size, results=results, progress=False)
    assert table["work"].tolist()[:4] == [5, 25, 10, 25]
    assert table["error"].dropna().to_dict() == {4: "RuntimeError: not now"}
    assert [len(lines(log, n)) for n in range(4)] == [1, 2, 2, 1]

    again = sweep(jobs, pool, run=size, results=results, progress=False)  # only what failed, which goes well now
    assert [len(lines(log, n)) for n in range(4)] == [1, 2, 3, 1]
    assert again["error"].isna().all()
    assert again.drop(index=[4, 5])["pid"].tolist() == table.drop(index=4)["pid"].tolist()
    if pool is not None:
        pool.shutdown()


def test_each_worker_has_its_own_gpu(cluster):
    cluster.wait_for_workers(2)
    table = sweep(jobs_of(6), cluster.get_executor(), run=size, progress=False)
    assert os.getpid() not in set(table["pid"])
    assert table.groupby("gpu")["pid"].nunique().to_dict() == {"0": 1, "1": 1}
    assert table["work"].tolist() == [5, 25, 10, 25, 15, 25, 20, 25, 25, 25, 30, 25]


def test_a_killed_dask_worker_costs_a_retry(cluster, tmp_path):
    log, results = tmp_path / "log", tmp_path / "sweep.jsonl"
    killed = []

    def kill():
        ends = time.monotonic() + 50
        while not (log.exists() and lines(log, 2)) and time.monotonic() < ends:
            time.sleep(0.05)
        killed.append(int(lines(log, 2)[0].split()[1]))
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    table = sweep(jobs_of(6, log, j2={"waits": 1}), cluster.get_executor(), run=size, results=results, progress=False)
    killer.join()
    assert table["error"].isna().all()
    assert table["work"].tolist() == [5, 25, 10, 25, 15, 25, 20, 25, 25, 25, 30, 25]
    assert len(lines(log, 2)) == 2
    assert killed[0] not in table.loc[4:5, "pid"].tolist()
    attempts = {entry["rows"][0]["batch"]: entry["attempts"] for entry in map(json.loads, results.read_text().splitlines())}
    assert attempts[3] == 2


def test_a_job_that_kills_its_workers_is_a_row(cluster, tmp_path):
    log = tmp_path / "log"
    table = sweep(jobs_of(1, log, j0={"dies": True}), cluster.get_executor(), run=size, progress=False)
    assert len(table) == 1
    assert table["error"][0].startswith("KilledWorker")
    assert len(lines(log, 0)) == 2
    assert sweep(jobs_of(2), cluster.get_executor(), run=size, progress=False)["error"].isna().all()  # new workers are there


def test_a_broken_process_pool_leaves_rows_and_a_second_run_takes_them_up(tmp_path):
    log, results = tmp_path / "log", tmp_path / "sweep.jsonl"
    jobs = jobs_of(4, log, j0={"dies": True})
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        table = sweep(jobs, pool, run=size, results=results, progress=False)
    assert table["error"].str.startswith("BrokenProcessPool").tolist() == [True] * 4
    again = sweep(jobs[1:], run=size, results=results, progress=False)
    assert again["error"].isna().all()


def test_an_interrupted_sweep_keeps_what_is_done(tmp_path):
    results = tmp_path / "sweep.jsonl"

    def interrupted(job):
        if job.kwargs["n"] == 2:
            raise KeyboardInterrupt
        return size(job)

    with pytest.raises(KeyboardInterrupt):
        sweep(jobs_of(4), run=interrupted, results=results, progress=False)
    results.write_text(results.read_text() + '{"schema": "omnigraph.sw')  # and the process died while it wrote
    ran = []
    table = sweep(jobs_of(4), run=lambda job: ran.append(job.kwargs["n"]) or size(job), results=results, progress=False)
    assert ran == [2, 3]
    assert len(table) == 8
    assert len([json.loads(line) for line in results.read_text().splitlines()]) == 4


def test_what_is_no_number_is_written_as_null(tmp_path):
    results = tmp_path / "sweep.jsonl"
    number = torch.tensor(3).numpy()
    table = sweep(jobs_of(1), run=lambda job: [{"a": float("nan"), "b": number, "c": 1.5}], results=results, progress=False)
    assert json.loads(results.read_text(), parse_constant=pytest.fail)["rows"] == [{"a": None, "b": 3, "c": 1.5}]
    assert sweep(jobs_of(1), run=pytest.fail, results=results, progress=False).equals(table)


@pytest.mark.parametrize("text", ["{}\n", "[1]\n", "batch,frames\n1,2\n", '{"schema": "omnigraph.plan/1"}\n'])
def test_another_file_is_refused_and_left_alone(text, tmp_path):
    path = tmp_path / "other"
    path.write_text(text)
    with pytest.raises(FileError, match=r"omnigraph\.sweep/1"):
        sweep(jobs_of(1), run=size, results=path, progress=False)
    assert path.read_text() == text


def test_jobs_are_checked():
    with pytest.raises(ValueError, match="more than once"):
        sweep([*jobs_of(2), *jobs_of(1)], run=size)
    with pytest.raises(ValueError, match="'bf16'"):
        Job("tiny", [(1, 4)], dtype="bf16")
    with pytest.raises(ValueError, match="write a function"):
        Job(object(), [(1, 4)])
    a, b = (Job("tiny", [(1, 4), (2, 4)], dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert a.key != b.key
    assert a.key == Job("tiny", [(2, 4), (1, 4)], dtype="float32").key


def test_models_by_name():
    assert isinstance(load_model("tiny"), torch.nn.Module)
    assert isinstance(load_model("omnigraph.models:tiny"), torch.nn.Module)
    for name in ("no_such", "omnigraph.models:no_such", "no_such_package:tiny"):
        with pytest.raises(ValueError, match=name):
            load_model(name)
    with pytest.raises(ValueError, match="OrderedDict"):
        load_model("collections:OrderedDict")


def test_profiles_of_a_real_model(tmp_path):
    shapes, measure = [(1, 4), (2, 8)], {"repeats": 5, "seconds_each": 0.01}
    jobs = [Job(model, shapes, dtype=dtype, device="cpu", measure=measure) for model in ("tiny", tiny) for dtype in ("float32", "float64")]
    table = sweep(jobs, results=tmp_path / "sweep.jsonl", progress=False)
    assert table["error"].isna().all()
    assert (table.groupby(["model", "dtype", "batch", "frames", "how"]).size() == 1).all()
    assert set(table["how"]) == {"eager", "plain"}
    assert set(table["dtype"]) == {"float32", "float64"}
    assert set(table["model"]) == {"tiny", "omnigraph.models._tiny:tiny"}
    assert (table["ms"] > 0).all()


def test_a_graph_that_cannot_be_made_is_a_row_with_its_error():
    job = Job("tiny", [(1, 4)], kwargs={"host_read": True}, measure={"repeats": 5, "seconds_each": 0.01})
    rows = {row["how"]: row for row in profile_job(job)}
    assert "error" not in rows["eager"]
    assert "CaptureError" in rows["plain"]["error"]


@pytest.mark.gpu
def test_profiles_of_a_gpu():
    rows = profile_job(Job("tiny", [(1, 4)], dtype="bfloat16", measure={"repeats": 5, "seconds_each": 0.01}))
    assert {row["device"] for row in rows} == {torch.cuda.get_device_name()}
    assert {row["how"] for row in rows} == {"eager", "plain"}
    assert {row["dtype"] for row in rows} == {"bfloat16"}
