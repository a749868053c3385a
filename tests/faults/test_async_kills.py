"""Kills of an asynchronous run between any two events: the resumed run is the uninterrupted one."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcross.engines.grid import LocalGrid
from fedcross.server.metrics import Metrics
from fedcross.server.observers.records import Visits
from fedcross.server.reply_log import WriteAheadLog
from fedcross.server.session import Session
from fedcross.strategies.parts.pooled import AsyncPool
from fedcross.strategies.parts.single_model import AsyncSingle
from tests.support import killer
from tests.support.federation import run, session
from tests.support.scale import size

pytestmark = pytest.mark.slow

KILLS = size(20, 40)
OVERRIDES = ["devices=extremes", "rounds=4", "checkpoint.log=true", "checkpoint.every=2", "evaluate_every=4"]
METHODS = ("fedcross_async", "gitfl", "fedasync", "fedbuff")


class Counted:
    """Counts events, and kills this process at event number `due`; never if that is 0."""

    def __init__(self, due: int = 0) -> None:
        self.due, self.passed = due, 0

    def event(self, *_: object) -> None:
        self.passed += 1
        if self.passed == self.due:
            os.kill(os.getpid(), signal.SIGKILL)

    def patch(self) -> None:
        for owner, name in (
            (WriteAheadLog, "accept"), (WriteAheadLog, "restart"), (Visits, "request"), (Visits, "round_finished"),
            (Metrics, "round_finished"), (LocalGrid, "_carry_out"), (AsyncPool, "aggregate"),
            (AsyncSingle, "aggregate"),
            (Session, "_checkpoint"), (Path, "replace"),
        ):  # fmt: skip
            killer.before(owner, name, self.event)
            killer.after(owner, name, self.event)


def files(folder):
    return killer.digest(folder), (folder / "visits.jsonl").read_text()


@pytest.fixture(scope="module", params=METHODS)
def whole(request, tmp_path_factory):
    """Return a method's settings, its uninterrupted run, and how many events that had."""
    torch.set_num_threads(1)  # a fork must not wait for threads that it does not have
    root = tmp_path_factory.mktemp(request.param)
    overrides = [f"method={request.param}", *OVERRIDES]
    overrides += ["method.buffer=3"] if request.param == "fedbuff" else []
    counted = Counted()
    counted.patch()
    try:
        run(root / "whole", *overrides)
    finally:
        killer.restore()
    return root, overrides, files(root / "whole"), counted.passed


def test_resumed_runs_equal_the_uninterrupted_one(whole):
    root, overrides, expected, events = whole
    due = np.random.default_rng(22).choice(np.arange(1, events + 1), KILLS // len(METHODS), replace=False)
    resumed = 0
    for number in map(int, due):
        folder = root / str(number)

        def killed(number=number, folder=folder):
            Counted(number).patch()
            run(folder, *overrides)

        assert os.WTERMSIG(killer.forked(killed)) == signal.SIGKILL
        if not list((folder / "checkpoints").glob("round-*.safetensors")):
            continue  # killed before the checkpoint of round 0: there is nothing to continue
        assert killer.forked(lambda: session(folder, *overrides, f"resume={folder}").execute()) == 0  # noqa: B023
        assert files(folder) == expected, number
        resumed += 1
    assert resumed >= len(due) - 2
