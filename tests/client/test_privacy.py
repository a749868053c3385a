from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.client import request
from fedcross.client.app import app as client_app
from fedcross.client.cache import RunCache
from fedcross.client.privacy import noise_source, protect
from fedcross.conf.schema import Privacy, load
from fedcross.core.errors import ConfigError
from fedcross.engines.workers import WorkersGrid
from fedcross.server.privacy import epsilon, statement
from tests.support.federation import SMALL, run, same, session

ON = ("privacy.enabled=true", "privacy.clip=0.5", "privacy.noise=0.02")
SEEDED = (*ON, "privacy.randomness=seed")


class Silent:
    """A generator whose noise is zero."""

    def normal(self, mean: float, deviation: float, shape: tuple[int, ...]) -> Any:
        return np.zeros(shape)


def clipped(received: dict[str, Any], trained: dict[str, Any], clip: float) -> dict[str, Any]:
    return protect(Privacy(clip=clip), received, trained, Silent())  # type: ignore[arg-type]


def test_clipping_by_hand() -> None:
    # u = (3, 4) over two entries, |u| = 5; with clip 2.5 half of it stays. Counters stay as they were received.
    received = {"a": np.float32([1, 1]), "n": np.array(3), "b": np.float32([[2]])}
    trained = {"a": np.float32([4, 1]), "n": np.array(9), "b": np.float32([[6]])}
    made = clipped(received, trained, 2.5)
    assert {name: array.tolist() for name, array in made.items()} == {"a": [2.5, 1], "n": 3, "b": [[4]]}
    assert list(made) == list(trained)
    assert made["a"].dtype == np.float32
    assert clipped(received, trained, 6.0)["b"].tolist() == [[6]]


def test_a_frozen_parameter_is_sent_as_it_was_received() -> None:
    """u = (3, 4) without the frozen b, |u| = 5: clip 2.5 leaves half. Noise is drawn for `a` alone."""
    received = {"a": np.zeros(2), "b": np.ones(2)}
    trained = {"a": np.array([3.0, 4.0]), "b": np.array([9.0, 9.0])}
    noise = 2.5 * np.random.default_rng(1).normal(size=2)
    made = protect(Privacy(clip=2.5, noise=1.0), received, trained, np.random.default_rng(1), {"b"})
    assert made["a"] == pytest.approx([1.5 + noise[0], 2.0 + noise[1]])
    assert made["b"].tolist() == [1, 1]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_update_that_broke_down_counts_as_none(value: float) -> None:
    received = {"a": np.float32([1, 1])}
    assert clipped(received, {"a": np.float32([value, 5])}, 1.0)["a"].tolist() == [1, 1]
    assert clipped(received, received, 1.0)["a"].tolist() == [1, 1]


@pytest.mark.slow
@given(st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=20), st.floats(0.01, 100))
def test_no_update_is_larger_than_the_clip(values: list[float], clip: float) -> None:
    received = {"a": np.zeros(len(values))}
    assert np.linalg.norm(clipped(received, {"a": np.array(values)}, clip)["a"]) <= clip * (1 + 1e-9)


def test_noise_has_the_size_that_was_asked_for() -> None:
    zero = {"a": np.zeros(200_000)}
    made = protect(Privacy(clip=2.0, noise=1.5), zero, zero, np.random.default_rng(0))["a"]
    # The standard deviation of n draws is known within about s / sqrt(2 n): 3 / 632; five times that is allowed.
    assert made.std() == pytest.approx(3.0, abs=0.025)
    assert made.mean() == pytest.approx(0.0, abs=0.035)


def test_noise_of_the_system_is_never_the_same_and_that_of_the_seed_always() -> None:
    def drawn(randomness: Any, *place: int) -> float:
        return float(noise_source(Privacy(randomness=randomness), 1, *place).normal())

    assert drawn("system", 1, 2, 0) != drawn("system", 1, 2, 0)
    assert drawn("seed", 1, 2, 0) == drawn("seed", 1, 2, 0)
    assert len({drawn("seed", 1, 2, 0), drawn("seed", 2, 2, 0), drawn("seed", 1, 3, 0), drawn("seed", 1, 2, 1)}) == 4


@pytest.mark.slow
def test_the_statement_is_about_the_client_that_was_asked_most_often() -> None:
    stated = statement(Privacy(noise=2.0), {0: 1, 4: 3, 2: 2})
    assert stated["uploads"] == 3
    assert stated["epsilon"] == epsilon(Privacy(noise=2.0), 3) > epsilon(Privacy(noise=2.0), 1)


@pytest.mark.slow
def test_a_run_states_its_epsilon_and_sends_nothing_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, answer = [], request.answer
    monkeypatch.setattr(request, "answer", lambda *parts: (answers.append(parts[3:5]), answer(*parts))[1])
    plain, noised = run(tmp_path / "plain"), run(tmp_path / "noised", *SEEDED)
    assert not same(plain.driver.global_model(), noised.driver.global_model())
    result = json.loads((tmp_path / "noised" / "result.json").read_text())
    assert 1 <= result["privacy"]["uploads"] <= 3
    assert result["privacy"]["epsilon"] == epsilon(Privacy(noise=0.02), result["privacy"]["uploads"])
    lines = [json.loads(text) for text in (tmp_path / "noised" / "metrics.jsonl").read_text().splitlines()]
    assert [line["train_loss"] for line in lines] == [None] * 3
    assert "privacy" not in json.loads((tmp_path / "plain" / "result.json").read_text())
    with_system = run(tmp_path / "system", *ON)
    assert answers[-1] == (1, {})
    assert not same(with_system.driver.global_model(), noised.driver.global_model())


@pytest.mark.slow
def test_seeded_noise_is_the_same_in_worker_processes(tmp_path: Path) -> None:
    inside = run(tmp_path / "inside", *SEEDED)
    beside = session(tmp_path / "beside", *SEEDED)
    grid: Any = beside.grid
    beside.grid = WorkersGrid(client_app, 6, grid._run_config, 2)
    try:
        beside.execute()
    finally:
        beside.grid.close()  # type: ignore[attr-defined]
    assert same(inside.driver.global_model(), beside.driver.global_model())


@pytest.mark.slow
def test_what_would_tell_more_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        load((*SMALL, *ON, "method=scaffold", "evaluate_local=true"))
    assert [fault.split(":")[0] for fault in caught.value.faults] == ["evaluate_local=true", "privacy.enabled=true"]
    config = load((*SMALL, *ON, "model=resnet18"))
    with pytest.raises(ConfigError, match="batch norm"):
        RunCache(config)
