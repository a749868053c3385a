"""Worker processes: same results as one process, and nothing that happens to a worker ends the federation."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message

from fedcross.client.app import app as client_app
from fedcross.client.app import warm_for
from fedcross.conf.compose import join
from fedcross.conf.schema import load
from fedcross.core.settings import DEVICE
from fedcross.engines import workers as workers_module
from fedcross.engines.grid import FIRST_NODE, RUN_ID, LocalGrid
from fedcross.engines.job import Job
from fedcross.engines.local import Params, open_grid
from fedcross.engines.workers import WorkersGrid
from fedcross.server.observers import Observer
from fedcross.server.session import Session
from tests.support.federation import SMALL, settle
from tests.support.toy import app as toy
from tests.support.toy import message

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux")


@contextmanager
def workers(count: int, clients: int = 6, app: Any = toy, **more: Any) -> Iterator[WorkersGrid]:
    grid = WorkersGrid(app, clients, more.pop("run_config", {}), count, **more)
    try:
        yield grid
    finally:
        grid.close()


def config(reply: Message) -> ConfigRecord:
    return reply.content.config_records["config"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_a_run_gives_the_same_model_with_any_number_of_workers(tmp_path: Path, count: int) -> None:
    def model(name: str, grid_of: Any) -> str:
        settled = [*SMALL, "rounds=2", "partition=dirichlet", f"output={tmp_path / name}"]
        grid = grid_of(join(settled))
        try:
            Session(load(settled), grid, Observer()).execute()
        finally:
            grid.close()
        return hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest()

    def forked(overrides: str) -> WorkersGrid:
        fork, sizes = warm_for(overrides)()
        assert fork
        assert len(sizes) == 6
        return WorkersGrid(client_app, 6, {"overrides": overrides}, count, sizes=sizes)

    alone = model("alone", lambda overrides: LocalGrid(client_app, 6, {"overrides": overrides}))
    assert model("workers", forked) == alone


@pytest.mark.slow
def test_replies_come_from_workers_and_carry_their_arrays() -> None:
    with workers(2) as grid:
        replies = list(grid.send_and_receive([message(i, length=400_000) for i in range(5)]))
        assert sorted(int(config(r)["who"]) for r in replies) == [0, 1, 2, 3, 4]  # type: ignore[arg-type]
        assert os.getpid() not in {config(r)["pid"] for r in replies}
        for reply in replies:
            array = reply.content.array_records["arrays"]["w"].numpy()
            assert (array == float(config(reply)["who"]) + 1).all()  # type: ignore[arg-type]


def test_a_node_keeps_its_context_whichever_worker_serves_it() -> None:
    with workers(2) as grid:
        for times in (1, 2, 3):
            replies = list(grid.send_and_receive([message(i) for i in range(4)]))
            assert {config(r)["times"] for r in replies} == {times}


def test_clients_with_the_most_examples_go_first() -> None:
    with workers(1, sizes=(5, 30, 10, 20, 1, 2)) as grid:
        replies = grid.send_and_receive([message(i) for i in (0, 1, 2, 3)])
        assert [config(r)["who"] for r in replies] == [1, 3, 2, 0]


@pytest.mark.slow
def test_an_exception_and_a_dead_worker_become_error_replies_and_the_round_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(workers_module, "log", lambda _level, text, *words: said.append(text % words))
    with workers(2) as grid:
        asked = [message(0), message(1, "die"), message(2, "raise"), message(3), message(4, "die"), message(5)]
        replies = list(grid.send_and_receive(asked))
        errors = {r.metadata.src_node_id - FIRST_NODE: r.error for r in replies if r.has_error()}
        assert {client: error.code for client, error in errors.items()} == {1: 8, 2: 2, 4: 8}
        assert "exit code -9" in errors[1].reason
        assert errors[2].reason == "ValueError: on purpose"
        assert sorted(said) == [f"client {client}: {errors[client].reason}" for client in (1, 4)]
        assert sorted(config(r)["who"] for r in replies if not r.has_error()) == [0, 3, 5]  # type: ignore[type-var]
        again = list(grid.send_and_receive([message(i) for i in range(6)]))
        assert not any(r.has_error() for r in again)


def test_what_is_forgotten_is_not_begun_and_its_late_reply_is_nobodys() -> None:
    """The only worker trains client 0; 1 and 2 wait. Who has trained shows in the clients' contexts later."""
    with workers(1) as grid:
        begun, waiting, wanted = grid.push_messages([message(0), message(1), message(2)])
        grid.forget(["", "unknown", waiting, begun])
        replies: list[Message] = []
        while not replies:
            replies += grid.pull_messages([wanted])
        assert [config(reply)["who"] for reply in replies] == [2]
        again = {config(r)["who"]: config(r)["times"] for r in grid.send_and_receive([message(i) for i in range(3)])}
        assert again == {0: 2, 1: 1, 2: 2}
        grid.forget([begun, waiting, wanted])
        assert len(list(grid.send_and_receive([message(0)]))) == 1


@pytest.mark.slow
def test_a_round_that_has_enough_replies_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """Four of six requests are not needed: none is trained in a later round, where its reply would be unknown."""
    few = ("method=fedavg", "clients_per_round=6", "federation.enough_replies=2")
    settings, overrides = settle(tmp_path, *few)
    with workers(2, app=client_app, run_config={"overrides": join(overrides)}) as grid:
        Session(settings, grid, Observer()).execute()
        assert grid._waiting == []
    lines = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["clients"], line["rejected"]) for line in lines] == [(6, {})] * 3


def test_close_ends_workers_that_are_busy() -> None:
    with workers(2) as grid:
        grid.push_messages([message(0, "sleep"), message(1, "sleep")])
        pids = [worker.process.pid for worker in grid._pool]
    assert all(pid is not None and not alive(pid) for pid in pids)


def test_a_worker_that_does_not_end_when_asked_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers_module, "_END_SECONDS", 0.1)
    with workers(1) as grid:
        process = grid._pool[0].process
        monkeypatch.setattr(process, "terminate", lambda: None)
    assert not Path(f"/proc/{process.pid}").exists()  # ended, and collected
    assert process.exitcode == -signal.SIGKILL


SCRIPT = """
import sys
from tests.support.toy import app as toy, message
from fedcross.engines.workers import WorkersGrid
grid = WorkersGrid(toy, 4, {}, 2)
grid.push_messages([message(0, "sleep"), message(1, "sleep")])
try:
    print(*(w.process.pid for w in grid._pool), flush=True)
    while True:
        grid.pull_messages([])
except KeyboardInterrupt:
    sys.exit(130)
finally:
    grid.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)])
def test_workers_end_with_their_parent(number: signal.Signals, code: int) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    if number == signal.SIGINT:
        os.killpg(parent.pid, number)  # as a terminal does: everybody in the group gets it
    else:
        parent.send_signal(number)
    _, errors = parent.communicate(timeout=600)
    assert parent.returncode == code
    assert "Traceback" not in errors
    deadline = time.monotonic() + 300
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    """Whether `pid` runs; one that ended and is not yet collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_workers_that_are_not_forked_find_the_app_by_its_name_and_take_the_gpus_in_turn() -> None:
    """A worker that died is replaced by one on the same GPU."""
    gpus = ["cuda:0", "cuda:1"]
    with workers(3, fork=False, app_path="tests.support.toy:app", devices=gpus) as grid:
        replies = list(grid.send_and_receive([message(client) for client in (2, 3, 4)]))
        where = {str(config(reply)["pid"]): config(reply)["device"] for reply in replies}
        assert [where[str(worker.process.pid)] for worker in grid._pool] == ["cuda:0", "cuda:1", "cuda:0"]
        assert sorted(config(reply)["who"] for reply in replies) == [2, 3, 4]
        assert sorted(str(config(reply)["device"]) for reply in replies) == ["cuda:0", "cuda:0", "cuda:1"]
        grid.send_and_receive([message(client, "die" if client == 3 else "") for client in (2, 3, 4)])
        replies = list(grid.send_and_receive([message(client) for client in (2, 3, 4)]))
        assert sorted(str(config(reply)["device"]) for reply in replies) == ["cuda:0", "cuda:0", "cuda:1"]
        assert {type(worker.process).__name__ for worker in grid._pool} == {"SpawnProcess"}


@pytest.mark.slow
def test_a_worker_that_is_not_forked_takes_the_runs_device_and_may_make_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a system without a safe fork. A message of its own takes the run from the process, as in Flower."""
    monkeypatch.setenv(DEVICE, "cuda:7")
    with workers(1, fork=False, app_path="tests.support.toy:app") as grid:
        (reply,) = grid.send_and_receive([message(0, "make")])
        assert (config(reply)["device"], config(reply)["run"]) == ("cuda:7", RUN_ID)
        assert type(grid._pool[0].process).__name__ == "SpawnProcess"


def test_auto_is_one_worker_per_core() -> None:
    assert Params().count() == len(os.sched_getaffinity(0))
    assert Params(workers=3).count() == 3


@pytest.mark.parametrize(("gpus", "devices"), [(0, []), (1, []), (2, ["cuda:0", "cuda:1"])])
def test_the_workers_of_a_run_are_spread_over_its_gpus(
    monkeypatch: pytest.MonkeyPatch, gpus: int, devices: list[str]
) -> None:
    """With one GPU, or the one that the run names, all workers use the run's own device."""
    seen: dict[str, Any] = {}
    monkeypatch.setattr("fedcross.engines.workers.WorkersGrid", lambda *_, **more: seen.update(more))
    job = Job("", 4, Params(), None, toy, Path(), Path(), lambda: (False, ()), None, gpus)  # type: ignore[arg-type]
    open_grid(job, 2)
    assert (seen["devices"], seen["fork"]) == (devices, False)
