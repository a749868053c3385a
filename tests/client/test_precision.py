"""Every method trains in bfloat16 too: nothing it computes with stays behind in float32."""

import json

import pytest
import yaml

from fedcross.conf.compose import CONF
from fedcross.strategies.method import Method
from fedcross.strategies.objective import Objective
from fedcross.strategies.round.registry import method_class
from tests.support.federation import run
from tests.support.methods import CLIENTS_OF_FEDAVG

#: One method of each kind: plain, two halves, a generator, a state, many widths, distillation, fused features.
KINDS = ("fedavg", "moon", "fedgen", "scaffold", "heterofl", "fedct", "fedfusion", "fedsam", "pgct", "flwr")


@pytest.mark.slow
@pytest.mark.parametrize("method", KINDS)
def test_every_method_trains_in_bfloat16(tmp_path, method):
    fusion = ["model=fedfusion_mnist"] if method.startswith("fedfusion") else []
    ready = run(tmp_path, f"method={method}", "train.precision=bfloat16", "rounds=2", "task.limit=60", *fusion)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["dropped"] for line in lines] == [0, 0]
    assert {str(array.dtype) for array in ready.driver.global_model().values()} <= {"float32", "int64"}


@pytest.mark.parametrize("method", CLIENTS_OF_FEDAVG)
def test_what_is_left_out_has_the_clients_of_fedavg(method):
    """No loss, no halves and no network of their own."""
    file = yaml.safe_load((CONF / "method" / f"{method}.yaml").read_text())
    kind = method_class(file.get("module", method))
    assert kind.Objective is Objective
    assert kind.network is Method.network
    assert not file.get("widths")
    assert not file.get("nested")
