"""Every method trains in bfloat16 too: nothing it computes with stays behind in float32."""

import json

import pytest
import yaml

from fedcross.conf.compose import CONF
from fedcross.strategies.parts.objective import Objective
from fedcross.strategies.round.base import Method
from fedcross.strategies.round.registry import method_class
from tests.support.federation import run
from tests.support.methods import CLIENTS, CLIENTS_OF_FEDAVG


@pytest.mark.slow
@pytest.mark.parametrize("method", CLIENTS)
def test_every_method_trains_in_bfloat16(tmp_path, method):
    fusion = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
    ready = run(tmp_path, f"method={method}", "train.precision=bfloat16", "rounds=2", "task.limit=60", *fusion)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["dropped"] for line in lines] == [0, 0]
    assert {str(array.dtype) for array in ready.method.global_model().values()} <= {"float32", "int64"}


@pytest.mark.parametrize("method", CLIENTS_OF_FEDAVG)
def test_what_is_left_out_has_the_clients_of_fedavg(method):
    """No loss, no halves and no network of their own."""
    file = yaml.safe_load((CONF / "method" / f"{method}.yaml").read_text())
    kind = method_class(file.get("module", method))
    assert kind.Objective is Objective
    assert not kind.halves
    assert kind.build_model.__func__ is Method.build_model.__func__
    assert not file.get("widths")
    assert not file.get("nested")
