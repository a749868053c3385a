import math

import pytest
import torch
from torch import nn

from fedcross.strategies.fedgen import TRAINED, adam, create, diversity_loss, generate, teacher_loss
from fedcross.strategies.objective import as_tensors


def test_lenet5_generator_has_100948_weights():
    generator = create(noise=100, classes=10, hidden=512, embedding=84, seed=0)
    assert sum(generator[name].size for name in TRAINED) == 100_948
    assert set(generator) == {*TRAINED, "norm.mean", "norm.variance"}


def test_generator_is_linear_norm_relu_linear():
    """Two training batches, then evaluation mode, against PyTorch's own layers with the same weights."""
    ours = as_tensors(create(noise=3, classes=2, hidden=5, embedding=4, seed=1))
    layers = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4))
    with torch.no_grad():
        for part, name in ((0, "hidden"), (3, "latent")):
            layers[part].weight.copy_(ours[f"{name}.weight"])
            layers[part].bias.copy_(ours[f"{name}.bias"])
    generator = torch.Generator().manual_seed(0)
    for train in (True, True, False):
        noise = torch.randn(6, 3, generator=generator)
        y = torch.tensor([0, 1, 0, 1, 1, 0])
        theirs = layers.train(train)(torch.cat([noise, torch.eye(2)[y]], 1))
        torch.testing.assert_close(generate(ours, noise, y, 2, train), theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["norm.mean"], layers[1].running_mean)
    torch.testing.assert_close(ours["norm.variance"], layers[1].running_var)


def test_teacher_loss_by_hand():
    """Embedding of one number z = 1, two classes, heads (0, 0) and (ln 3, 0), shares of label 0: 1/4 and 3/4.

    CE of label 0: ln 2 for the first head, -ln(3/4) for the second; label 1 belongs to the second alone: -ln(1/4).
    """
    heads = torch.tensor([[[0.0], [0.0]], [[math.log(3)], [0.0]]])
    shares = torch.tensor([[0.25, 0.75], [0.0, 1.0]])
    loss = teacher_loss(torch.ones(2, 1), torch.tensor([0, 1]), heads, torch.zeros(2, 2), shares)
    first = 0.25 * math.log(2) + 0.75 * math.log(4 / 3)
    assert float(loss) == pytest.approx((first + math.log(4)) / 2, rel=1e-6)


def test_diversity_loss_by_hand():
    """Noise (0, 0) and (2, 0): squared difference 4/2 = 2. z = (0, 0), (1, 3): mean difference 2.

    Of four ordered pairs two give 2 * 2, two give 0: exp(-2). Equal embeddings give exp(0).
    """
    noise = torch.tensor([[0.0, 0.0], [2.0, 0.0]])
    assert float(diversity_loss(noise, torch.tensor([[0.0, 0.0], [1.0, 3.0]]))) == pytest.approx(math.exp(-2))
    assert float(diversity_loss(noise, torch.ones(2, 2))) == 1.0


def test_a_step_is_that_of_torch_adam_with_weight_decay():
    weights = {"w": torch.tensor([1.0, -2.0, 0.5])}
    theirs, moments = weights["w"].clone().requires_grad_(), {}
    optimizer = torch.optim.Adam([theirs], lr=0.05, weight_decay=0.3)
    for number in (1, 2):
        theirs.grad = torch.tensor([0.2, 0.4, -0.1]) * number
        optimizer.step()
        adam(weights, {"w": theirs.grad}, moments, number, 0.05, 0.3)
    torch.testing.assert_close(weights["w"], theirs.detach(), rtol=1e-5, atol=1e-7)
