import json

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from tests.support.federation import SMALL, run, session

PRIVATE = "privacy.enabled=true"


@pytest.mark.slow
def test_only_models_travel(tmp_path):
    report = run(tmp_path, "method=fedexg", "rounds=1").driver.report
    assert report.bytes_down == report.bytes_up == 2 * 3 * 4 * 4810


def test_with_privacy_too_nothing_but_noised_models_travel(tmp_path):
    """Both visits of a round are counted, and neither tells a loss, a number of examples or prototypes."""
    ready = session(tmp_path, "method=fedexg", "rounds=1", PRIVATE, "privacy.noise=0.01")
    seen = []
    real = ready.driver.method.aggregate

    def aggregate(state, current, uploads):
        seen.extend((current.exchange, one) for one in uploads)
        return real(state, current, uploads)

    ready.driver.method.aggregate = aggregate
    ready.execute()
    assert [exchange for exchange, _ in seen] == [0, 0, 0, 1, 1, 1]
    assert all((one.extras, one.metrics, one.num_examples) == ({}, {}, 1) for _, one in seen)
    assert json.loads((tmp_path / "result.json").read_text())["privacy"]["uploads"] == 2


@pytest.mark.parametrize(
    "settings",
    [
        ("method=fedct", "method.broadcast=random", "method.kappa=0", "method.eta=0"),
        ("method=pgct", "method.kappa=0", "method.eta=0"),
    ],
)
def test_what_decides_is_whether_these_settings_need_prototypes(settings):
    load([*SMALL, *settings, PRIVATE])
    with pytest.raises(ConfigError, match="sends more than its model"):
        load([*SMALL, settings[0], PRIVATE])
