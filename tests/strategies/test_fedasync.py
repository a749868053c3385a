"""FedAsync by hand, and as every asynchronous method with one model: what slots send, and restarts."""

import numpy as np
import pytest

from fedcross.strategies.fedasync import FedAsync
from fedcross.strategies.method import Round, Upload
from tests.support.federation import run, same
from tests.support.game import Game


def started(kind=FedAsync, k=2, **values):
    method = Game(
        kind,
        {"w": np.zeros(1, np.float32), "n": np.array(0, np.int64)},
        {"w"},
        clients_per_round=k,
        rounds=10,
        **values,
    )
    for slot in range(k):
        method.send(slot)
    return method


def arrive(method, slot, w):
    upload = Upload(0, slot, {"w": np.float32([w]), "n": np.array(int(w), np.int64)}, {}, 1, {})
    assert method.aggregate(Round(1, 0, (), 0), [upload]) == {}
    method.send(slot)


def test_fresh_and_stale_uploads_by_hand():
    """Fresh: .5 8 = 4. Slot 1's is one version old: .5 2^-1 = .25: 3 + .25 16 = 7. Slot 0's next one too: 5.25."""
    method = started(beta=0.5, power=1.0)
    arrive(method, 0, 8.0)
    assert method.global_model()["w"] == 4
    arrive(method, 1, 16.0)
    assert method.global_model()["w"] == pytest.approx(7)
    arrive(method, 0, 0.0)
    assert method.global_model()["w"] == pytest.approx(5.25)
    assert method.global_model()["n"] == 5
    assert method.version == 3


def test_a_slot_sends_the_model_of_its_dispatch_until_its_visit_ends():
    method = started()
    arrive(method, 0, 10.0)
    assert method.tasks[1].arrays["w"] == 0
    assert method.tasks[0].arrays["w"] == 6


def test_beta_1_without_staleness_is_the_last_upload():
    method = started(beta=1.0, power=0.0)
    arrive(method, 1, 3.0)
    arrive(method, 0, 5.0)
    assert method.global_model()["w"] == 5


@pytest.mark.slow
def test_a_resume_with_a_half_full_buffer_is_exact(tmp_path):
    settings = ("method=fedbuff", "method.buffer=2", "devices=uniform", "checkpoint.keep=9")
    one = run(tmp_path, *settings, "rounds=4").driver
    for late in (3, 4):
        (tmp_path / "checkpoints" / f"round-{late:06d}.safetensors").unlink()
    two = run(tmp_path, *settings, "rounds=4", f"resume={tmp_path}").driver
    before, after = one.checkpoint(), two.checkpoint()
    assert same(before.arrays, after.arrays)
    assert before.values == after.values
    assert one.state.version >= 4
