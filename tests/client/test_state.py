import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client.request import state_root
from fedcross.client.state import StateStore
from fedcross.core.errors import ProtocolError, StorageError
from tests.support.disk import largest_file
from tests.support.federation import run


def test_the_accepted_visit_is_continued_not_the_last(tmp_path):
    store = StateStore(tmp_path, "run", 3)
    store.save(1, {"c": np.float32([1])}, keep=0)
    store.save(2, {"c": np.float32([2])}, keep=1)  # this upload gets lost
    assert StateStore(tmp_path, "run", 3).load(1)["c"] == 1
    store.save(3, {"c": np.float32([3])}, keep=1)
    assert store.load(3)["c"] == 3


def test_old_states_are_forgotten_and_the_accepted_one_stays(tmp_path):
    store = StateStore(tmp_path, "run", 0)
    for visit in (1, 2, 3):
        store.save(visit, {"c": np.float32([visit])}, keep=visit - 1)
    assert sorted(path.stem for path in store.folder.glob("*.npz")) == ["2", "3"]


def test_a_new_or_replaced_device_starts_empty(tmp_path):
    store = StateStore(tmp_path, "run", 0)
    assert store.load(0) == {}
    assert store.load(9) == {}


def test_runs_and_clients_do_not_meet(tmp_path):
    StateStore(tmp_path, "a", 0).save(1, {"c": np.zeros(1)}, 0)
    assert StateStore(tmp_path, "b", 0).load(1) == {}
    assert StateStore(tmp_path, "a", 1).load(1) == {}


def test_an_unwritable_place_is_an_error_that_says_so(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StorageError, match="free disk space"):
        StateStore(blocked, "run", 0).save(1, {"c": np.zeros(1)}, 0)


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    store = StateStore(tmp_path, "run", 0)
    store.save(1, {"c": np.zeros(3)}, keep=0)
    with largest_file(4096):
        for visit in (2, 3):
            with pytest.raises(StorageError, match="cannot be written"):
                store.save(visit, {"c": np.zeros(100_000)}, keep=1)
    assert [path.name for path in store.folder.iterdir()] == ["1.npz"]
    assert store.load(1)["c"].tolist() == [0, 0, 0]


def forgetting_disk():
    """Return the client app of a device whose disk is replaced before every visit."""
    import shutil

    from flwr.clientapp import ClientApp

    from fedcross.client.app import app as client_app

    app = ClientApp()

    @app.train()
    def train(message, context):
        shutil.rmtree(state_root(), ignore_errors=True)
        return client_app(message, context)

    return app


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("fedgen", False),
        ("fedproc", False),
        ("fedfusion", False),
        ("fedfusion method.momentum=keep", True),
        ("moon", True),
    ],
)
def test_only_what_a_method_keeps_is_looked_for(tmp_path, monkeypatch, method, kept):
    """A client that comes again finds what its method keeps; a method that keeps nothing is not told of a lost disk."""
    missing: list[object] = []
    monkeypatch.setattr("fedcross.client.state.log", lambda *message: missing.append(message))
    overrides = [f"method={method.split()[0]}", *method.split()[1:], "clients_per_round=6", "rounds=2"]
    if "fedfusion" in method:
        overrides += ["model=fedfusion_mnist", "partition.clients=2", "clients_per_round=2", "task.limit=40"]
    run(tmp_path, *overrides)
    assert missing == []
    assert bool(list(state_root().rglob("*.npz"))) == kept


@pytest.mark.parametrize("run", ["../x", "a/b", "/tmp/x", "..", ".", "a b", "x" * 65, "ä", "a\n"])
def test_a_run_that_names_another_place_is_refused(tmp_path, run):
    with pytest.raises(ProtocolError, match="not a name of a run"):
        StateStore(tmp_path, run, 0)
    with pytest.raises(ProtocolError, match="not negative"):
        StateStore(tmp_path, "run", -1)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_state_is_as_none_and_strange_files_stay(tmp_path):
    store = StateStore(tmp_path, "run", 0)
    store.save(1, {"c": np.zeros(3)}, keep=0)
    (store.folder / "1.npz").write_bytes((store.folder / "1.npz").read_bytes()[:40])
    (store.folder / "notes.npz").write_bytes(b"\xff")
    assert store.load(1) == {}
    store.save(2, {"c": np.zeros(3)}, keep=2)
    assert sorted(path.name for path in store.folder.iterdir()) == ["2.npz", "notes.npz"]
    assert {path.stat().st_mode & 0o777 for path in (store.folder.parent, store.folder)} == {0o700}
    assert (store.folder / "2.npz").stat().st_mode & 0o777 == 0o600


def test_a_state_may_have_any_name_and_scalars(tmp_path):
    """numpy.savez takes `file` for an argument of its own; a network can have a parameter of that name."""
    state = {name: np.array(i) for i, name in enumerate(["file", "args", "allow_pickle", ".residual.w", "a/b"])}
    store = StateStore(tmp_path, "run", 1)
    store.save(1, state, 1)
    found = store.load(1)
    assert list(found) == list(state)
    assert all(found[name].shape == () and found[name] == value for name, value in state.items())


class Odd(nn.Module):
    """A network with names that a client's state must not take for its own."""

    def __init__(self, classes: int, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), 16))
        self._residual = nn.Linear(16, 16)
        self.file = nn.Parameter(torch.ones(16))
        self.classifier = nn.Linear(16, classes)

    def forward(self, x):
        h = self.body(x)
        return self.classifier(h * self.file + self._residual(h))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("method", ["feddyn", "scaffold"])
def test_a_network_may_have_any_names(tmp_path, method, kind):
    """Each of two clients trains three times."""
    model = ("model=own", "model.path=tests.client.test_state:Odd")
    run(tmp_path, f"method={method}", *model, "partition.clients=2", "clients_per_round=2", f"compression.up={kind}")
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["dropped"] for line in lines] == [0, 0, 0]
