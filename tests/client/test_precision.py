"""Every method trains in bfloat16 too: nothing it computes with stays behind in float32."""

import json

import pytest

from tests.support.federation import run

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
