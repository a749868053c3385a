"""What every objective stands on: means over real rows, flat parameters, arrays and tensors."""

import numpy as np
import pytest
import torch

from fedcross.core.settings import Settings
from fedcross.strategies.objective import Batch, Objective, as_arrays, as_tensors, flatten
from tests.support.plain import PlainNet
from tests.support.visits import small_net, visit


def test_a_mean_is_over_the_real_rows():
    """(1 + 5) / 2 = 3; the padded 100 does not count. Without a mask (1 + 100 + 5 + 2) / 4 = 27."""
    values, x = torch.tensor([1.0, 100.0, 5.0, 2.0]), torch.zeros(4, 1)
    y = torch.zeros(4, dtype=torch.int64)
    assert Batch(x, y, torch.tensor([1.0, 0, 1, 0])).mean(values) == 3
    assert Batch(x, y).mean(values) == 27


def test_parameters_in_a_row_are_those_in_order():
    params = {"b": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "a": torch.tensor(5.0)}
    assert flatten(params).tolist() == [1, 2, 3, 4, 5]


def test_tensors_own_their_values_and_arrays_are_those_of_the_tensors():
    arrays = {"w": np.array([1.0, 2.0]), "n": np.array(3)}
    tensors = as_tensors(arrays, like=torch.zeros(1))
    arrays["w"][0] = 9
    assert tensors["w"].tolist() == [1, 2]
    assert as_tensors(arrays)["w"].tolist() == [9, 2]
    back = as_arrays({"w": tensors["w"].requires_grad_(), "n": tensors["n"]})
    assert {name: (array.tolist(), str(array.dtype)) for name, array in back.items()} == {
        "w": ([1, 2], "float64"), "n": (3, "int64"),
    }  # fmt: skip


def test_tensors_lie_where_their_model_lies():
    assert as_tensors({"w": np.zeros(2)}, like=torch.zeros(1, device="meta"))["w"].device.type == "meta"


def test_the_base_is_cross_entropy_and_predicts_in_evaluation_behaviour():
    """logits = 2 x + 1."""
    objective, net = Objective(Settings()), PlainNet()
    params = {"scale": torch.tensor(2.0), "bias": torch.tensor(1.0)}
    assert objective.predict(net, params, {}, torch.tensor([[3.0]]), {}).tolist() == [[7]]
    assert net.trained == [False]
    loss = objective.loss(net, params, {}, Batch(torch.tensor([[0.0, 0.0]]), torch.tensor([1])), {})
    assert loss.item() == pytest.approx(np.log(2))
    assert net.trained == [False, True]


def test_the_inputs_of_a_visit_can_be_read_at_once():
    one = visit(small_net(), client=0, n=3)
    assert torch.equal(one.x, one.inputs[torch.arange(3)])
