"""A module as functions of its parameters and buffers: batch normalisation of one feature, then a linear classifier."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.client.flat_model import ModuleNet, channels_last
from fedcross.tasks.models._split import Split

X = torch.tensor([[1.0], [3.0]])


def net(precision="float32"):
    """Return the network: running mean 1, variance 4; classifier z -> (z, -2 z)."""
    norm, classifier = nn.BatchNorm1d(1, eps=1e-12), nn.Linear(1, 2, bias=False)
    norm.running_mean.fill_(1.0)
    norm.running_var.fill_(4.0)
    classifier.weight.data.copy_(torch.tensor([[1.0], [-2.0]]))
    return ModuleNet(Split(norm, classifier), torch.device("cpu"), precision)


def others(tensors, **changes):
    """Return copies of `tensors`; those whose last part of the name is among `changes` are filled with that value."""
    copies = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    for name, tensor in copies.items():
        if (last := name.split(".")[-1]) in changes:
            tensor.fill_(changes[last])
    return copies


def test_training_normalises_by_the_batch_and_updates_the_statistics():
    """Mean 2, variance 1: (-1, 1). The running mean moves a tenth of the way from 1 to 2."""
    one = net()
    assert one.features(one.params, one.buffers, X).ravel().tolist() == pytest.approx([-1, 1])
    assert one.buffers["features.running_mean"].item() == pytest.approx(1.1)
    assert one.logits(one.params, one.buffers, X)[1].tolist() == pytest.approx([1, -2])


def test_evaluation_normalises_by_the_statistics_and_leaves_them():
    """(1 - 1) / 2 = 0 and (3 - 1) / 2 = 1, with the live parameters too."""
    one = net()
    assert one.features(one.params, one.buffers, X, train=False).ravel().tolist() == pytest.approx([0, 1])
    assert one.logits(one.params, one.buffers, X, train=False)[1].tolist() == pytest.approx([1, -2])
    assert one.buffers["features.running_mean"].item() == 1


def test_other_parameters_and_buffers_are_those_that_count():
    """Weight 2 and bias 1 of the normalisation: (-1, 3) in training; statistics of 0 and 1: 2 x + 1 in evaluation."""
    one = net()
    params = others(one.params, bias=1.0)
    params["features.weight"] = torch.tensor([2.0])
    assert one.features(params, one.buffers, X).ravel().tolist() == pytest.approx([-1, 3])
    assert one.buffers["features.running_mean"].item() == pytest.approx(1.1)  # what is given is updated
    buffers = others(one.buffers, running_mean=0.0, running_var=1.0)
    assert one.features(params, buffers, X, train=False).ravel().tolist() == pytest.approx([3, 7])
    assert one.features(one.params, buffers, X, train=False).ravel().tolist() == pytest.approx([1, 3])
    one.features(one.params, buffers, X)
    assert buffers["features.running_mean"].item() == pytest.approx(0.2)
    assert one.buffers["features.running_mean"].item() == pytest.approx(1.1)
    z = torch.tensor([[5.0]])
    assert one.classify(params, buffers, z).tolist() == [[5, -10]]
    assert one.call("classifier", params, buffers, z, train=False).tolist() == [[5, -10]]


def test_narrow_arithmetic_gives_float32():
    one = net("bfloat16")
    scores = one.logits(one.params, one.buffers, X, train=False)
    assert scores.dtype == torch.float32
    assert scores[1].tolist() == [1, -2]  # exact in bfloat16


def test_only_images_of_convolutions_are_laid_out_channels_last():
    line, image = net(), ModuleNet(Split(nn.Conv2d(2, 1, 1), nn.Linear(1, 1)), torch.device("cpu"))
    x = torch.zeros(2, 2, 3, 3)
    assert image.arrange(x).is_contiguous(memory_format=torch.channels_last)
    assert not line.arrange(x).is_contiguous(memory_format=torch.channels_last)
    for other in (X, torch.zeros(2, 3, 4), torch.zeros(1, 2, 3, 4, 5)):
        assert image.arrange(other) is other


@pytest.mark.parametrize(("precision", "last"), [("float32", False), ("tf32", True), ("bfloat16", True)])
def test_images_lie_channels_first_on_a_gpu_in_float32(precision, last):
    image = Split(nn.Conv2d(2, 1, 1), nn.Linear(1, 1))
    assert channels_last(image, torch.device("cuda:0"), precision) == last
    assert channels_last(image, torch.device("cpu"), precision)


@pytest.mark.parametrize(
    ("layer", "last"),
    [
        (nn.Conv2d(7, 8, 1, stride=2), False),
        (nn.Conv2d(8, 8, 1, stride=(1, 2), groups=2), False),
        (nn.Conv2d(8, 8, 1, stride=2), True),
        (nn.Conv2d(7, 8, 1), True),
        (nn.Conv2d(7, 8, (1, 3), stride=2), True),
    ],
)
def test_no_layout_with_which_torch_writes_beyond_its_memory(layer, last):
    net = ModuleNet(nn.Sequential(nn.Conv2d(3, layer.in_channels, 3), layer), torch.device("cpu"))
    x = net.arrange(torch.zeros(2, 3, 8, 8))
    assert x.is_contiguous(memory_format=torch.channels_last) is last


def test_what_is_not_in_the_state_dict_is_no_buffer():
    module = Split(nn.Identity(), nn.Linear(1, 1, bias=False))
    module.register_buffer("scratch", torch.zeros(3), persistent=False)
    module.register_buffer("kept", torch.zeros(2))
    assert list(ModuleNet(module, torch.device("cpu")).buffers) == ["kept"]


def test_loading_and_reading_by_name():
    one = net()
    model = {name: np.full_like(array, 7) for name, array in one.read().items()}
    one.load(model)
    assert all((array == 7).all() for array in one.read().values())
    assert one.flat.tolist() == [7, 7, 7, 7]
    assert list(one.read()) == list(one.module.state_dict())


def numbered(one):
    """Return a model in which no two values are equal."""
    return {
        name: (10 * place + np.arange(array.size)).reshape(array.shape).astype(array.dtype)
        for place, (name, array) in enumerate(one.read().items(), 1)
    }


def test_a_model_crosses_to_a_gpu_and_back_in_rows_of_one_type():
    """By the ways of a GPU, on the CPU; the second model takes the rows of the first."""
    one = net()
    model = numbered(one)
    for sent in ({name: array + 1 for name, array in model.items()}, model):
        one._upload(sent)
        assert {name: array.tolist() for name, array in one.read().items()} == {n: a.tolist() for n, a in sent.items()}
    assert sorted(one._rows, key=str) == [(torch.float32, 2), (torch.float32, 4), (torch.int64, 1)]
    one.device = SimpleNamespace(type="cuda")
    found = one.read()
    assert list(found) == one.names
    assert all(found[name].dtype == model[name].dtype for name in model)
    assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in model.items()}
    one.flat.zero_()
    assert found["classifier.weight"].any()  # a copy


@pytest.mark.parametrize("act", [lambda one: one.load(dict.fromkeys(one.names, np.zeros(1))), lambda one: one.read()])
def test_a_gradient_outside_its_row_is_noticed(act):
    one = net()
    model = numbered(one)
    one.params["features.bias"].grad = None
    with pytest.raises(RuntimeError, match=r"gradient of features\.bias lies outside"):
        act(one)
    assert one.arrays(others(one.params), one.buffers).keys() == model.keys()  # of other values nothing is expected
