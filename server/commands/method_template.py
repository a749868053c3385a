"""The three files of ``fedcross new-method``: a small method with state on the server and on the clients.

``@NAME@`` stands for the method's name, ``@CLASS@`` for its class. docs/adding-a-method.md explains the same files.
"""

from __future__ import annotations

METHOD = '''"""@CLASS@: FedAvg with momentum on the server; clients keep their optimiser's momentum between visits."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from fedcross.core.settings import Settings
from fedcross.strategies.parts.averaging import weighted_mean
from fedcross.strategies.parts.objective import Objective, Outcome, Prepared, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.round.federation import State
from fedcross.strategies.round.single_model import SingleModel
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import Arrays


class @CLASS@Params(Settings):
    """Settings of @CLASS@: ``method.beta`` on the command line."""

    beta: float = Field(0.5, ge=0, lt=1, description="share of the server's last step that is taken again")


class @CLASS@Objective(Objective[@CLASS@Params]):
    """The client's half: cross-entropy, started with the momentum that the client kept at its last visit."""

    keeps = True  # `finish` returns a state, which the client stores for its next visit

    def prepare(self, visit: Visit) -> Prepared:
        """Take up the momentum of the client's last visit; at its first visit there is none."""
        if "momentum" in visit.state:
            visit.momentum = as_tensors({"momentum": visit.state["momentum"]}, like=visit.y)["momentum"]
        return {}

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Keep the momentum; it stays on the client."""
        assert trained.momentum is not None
        return Outcome(state=as_arrays({"momentum": trained.momentum}))


class @CLASS@(SingleModel[@CLASS@Params]):
    """The server's half. With the mean u of the uploads: ``v = beta v + (u - w)``, then ``w = w + v``.

    State: the model w and the velocity v. Wire: one model down and up. Buffers (statistics of batch normalisation) are
    no parameters: they take the mean of the uploads. A round without uploads changes nothing.
    """

    Objective = @CLASS@Objective

    def setup(self, arrays: Arrays) -> None:
        """Keep the initial model and start with a velocity of zero."""
        super().setup(arrays)
        self.velocity: Arrays = {name: np.zeros_like(arrays[name]) for name in self.parameter_names}

    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Take a step along the velocity; return a metric for the round's line in ``metrics.jsonl``."""
        if not uploads:
            return {}
        mean = weighted_mean([upload.arrays for upload in uploads], self.weights(uploads))
        for name in self.parameter_names:
            self.velocity[name] = self.params.beta * self.velocity[name] + (mean[name] - self.model[name])
            mean[name] = self.model[name] + self.velocity[name]
        self.model = mean
        return {"velocity": float(np.sqrt(sum(float((v**2).sum()) for v in self.velocity.values())))}

    def state(self) -> State:
        """Return everything that a resumed run needs: the model, from the base class, and the velocity."""
        state = super().state()
        state.arrays |= {f"velocity.{name}": array for name, array in self.velocity.items()}
        return state

    def restore(self, state: State) -> None:
        """Load what :meth:`state` returned."""
        super().restore(state)
        self.velocity = {name: state.arrays[f"velocity.{name}"] for name in self.parameter_names}
'''

SETTINGS = """# fedcross method=@NAME@ task=digits method.beta=0.5
name: @NAME@
beta: 0.5 # share of the server's last step that is taken again
"""

TEST = '''"""Tests of @CLASS@: numbers worked by hand, a round without uploads, a resumed run."""

import os
from pathlib import Path

import numpy as np
import pytest

ROOT = str(Path(__file__).resolve().parents[1])
os.environ["FEDCROSS_PATH"] = os.pathsep.join(part for part in (os.environ.get("FEDCROSS_PATH"), ROOT) if part)

import fedcross  # noqa: E402
from fedcross.conf.compose import activate_plugins  # noqa: E402
from fedcross.core.errors import ConfigError  # noqa: E402
from fedcross.strategies.round.registry import method_class  # noqa: E402
from fedcross.strategies.wire.protocol import Round, Upload  # noqa: E402

SMALL = (
    "method=@NAME@", "task=digits", "task.limit=120", "partition=iid", "partition.clients=4",
    "clients_per_round=2", "train.epochs=1", "engine.workers=1", "logger=none", "device=cpu",
)  # fmt: skip


def model(weight):
    """A model of one parameter and one buffer."""
    return {"w": np.array([weight], np.float32), "seen": np.array([weight], np.float32)}


def ready(**settings):
    activate_plugins()
    method = method_class("@NAME@")(**settings)
    method.begin(model(0.0), parameters={"w"})
    return method


def upload(weight, examples):
    return Upload(client=0, slot=0, arrays=model(weight), extras={}, num_examples=examples, metrics={})


def test_two_rounds_by_hand():
    method = ready(beta=0.5)
    # Round 1: the mean of 1 (one example) and 3 (three) is 2.5; v = 2.5, w = 2.5.
    assert method.aggregate(Round(1, 0, (0, 1), 1), [upload(1.0, 1), upload(3.0, 3)]) == {"velocity": 2.5}
    assert method.global_model()["w"] == 2.5
    # Round 2: the mean is 3; v = 0.5 * 2.5 + 0.5 = 1.75, w = 4.25. The buffer is the mean.
    method.aggregate(Round(2, 0, (0,), 1), [upload(3.0, 1)])
    assert method.global_model()["w"] == 4.25
    assert method.global_model()["seen"] == 3.0


def test_a_round_without_uploads_changes_nothing():
    method = ready()
    assert method.aggregate(Round(1, 0, (0,), 1), []) == {}
    assert method.global_model()["w"] == 0


def test_the_state_holds_everything():
    first, second = ready(), ready()
    first.aggregate(Round(1, 0, (0,), 1), [upload(2.0, 1)])
    second.restore(first.state())
    for method in (first, second):
        method.aggregate(Round(2, 0, (0,), 1), [upload(5.0, 1)])
    assert first.global_model()["w"] == second.global_model()["w"]


def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path):
    fedcross.run(*SMALL, "rounds=1", f"output={tmp_path / 'a'}")
    resumed = fedcross.run(f"resume={tmp_path / 'a'}", "rounds=2")
    whole = fedcross.run(*SMALL, "rounds=2", f"output={tmp_path / 'b'}")
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()
    assert resumed.metrics["velocity"][1] == whole.metrics["velocity"][1] > 0


def test_settings_out_of_range_are_refused():
    with pytest.raises(ConfigError, match="beta"):
        ready(beta=1.0)
'''
#: Words of METHOD that a class of the same name would hide.
TAKEN = frozenset(
    {"arrays", "field", "objective", "outcome", "prepared", "round", "settings", "singlemodel", "state", "trained"}
    | {"upload", "visit", "method"}
)


def files(name: str) -> dict[str, str]:
    """Return the text of the three files for a method called `name`, by their paths in the user's folder."""
    kind = "".join(part.capitalize() for part in name.split("_"))
    texts = {
        f"strategies/{name}.py": METHOD,
        f"conf/method/{name}.yaml": SETTINGS,
        f"tests/test_{name}.py": TEST,
    }
    return {path: text.replace("@NAME@", name).replace("@CLASS@", kind) for path, text in texts.items()}
