import math

import numpy as np
import pytest
import torch

from fedcross.strategies.objective import Batch
from fedcross.strategies.parts.prototypes import NEVER, average, class_means, contrast, cosines, fuse, neighbours
from tests.support.plain import PlainNet

UNIT = torch.eye(2, dtype=torch.float64)
BOTH = torch.tensor([True, True])


def held(vectors, present):
    return {"vectors": vectors, "present": present}


def test_class_means_with_an_absent_class():
    # f = 2 x. Class 0: mean of (2, 4) and (6, 8) is (4, 6); class 1 has nobody; class 2: (10, 12).
    net = PlainNet()
    x = torch.tensor([[1.0, 2.0], [5.0, 6.0], [3.0, 4.0]])
    found = class_means(net, {"scale": torch.tensor(2.0)}, {}, x, torch.tensor([0, 2, 0]), classes=3)
    assert found["vectors"].tolist() == [[4.0, 6.0], [0.0, 0.0], [10.0, 12.0]]
    assert found["present"].tolist() == [True, False, True]
    assert net.trained == [False]


def test_class_means_over_chunks_equal_those_at_once(monkeypatch):
    x, y = torch.randn(25, 3, generator=torch.Generator().manual_seed(1)), torch.arange(25) % 4
    params = {"scale": torch.tensor(1.0)}
    whole = class_means(PlainNet(), params, {}, x, y, 4)["vectors"]
    monkeypatch.setattr("fedcross.strategies.parts.prototypes.CHUNK", 7)
    parts = class_means(PlainNet(), params, {}, x, y, 4)["vectors"]
    assert (whole == parts).all()


def test_the_global_view_is_the_plain_mean_over_holders():
    # Class 0 is held by both: (1 + 3) / 2 = 2. Class 1 by the second only: 5, not 2.5. Class 2 by nobody.
    a = held(np.array([[1.0], [9.0], [9.0]], np.float32), np.array([True, False, False]))
    b = held(np.array([[3.0], [5.0], [9.0]], np.float32), np.array([True, True, False]))
    mean = average([a, b])
    assert mean["vectors"].tolist() == [[2.0], [5.0], [0.0]]
    assert mean["present"].tolist() == [True, True, False]
    assert mean["vectors"].dtype == np.float32


def test_fusion_takes_the_view_that_there_is():
    # share 0.25: class 0: 0.25 * 8 + 0.75 * 4 = 5; class 1 only global; class 2 only local; class 3 in neither.
    overall = held(np.array([[8.0], [6.0], [0.0], [0.0]], np.float32), np.array([True, True, False, False]))
    local = held(np.array([[4.0], [0.0], [7.0], [0.0]], np.float32), np.array([True, False, True, False]))
    fused = fuse(overall, local, 0.25)
    assert fused["vectors"].tolist() == [[5.0], [6.0], [7.0], [0.0]]
    assert fused["present"].tolist() == [True, True, True, False]


def test_cosines_by_hand():
    """f = (1, 0) and (3, 4); prototypes (3, 4) of length 5, (0, 2), and one that is not there."""
    f = torch.tensor([[1.0, 0.0], [3.0, 4.0]], dtype=torch.float64)
    vectors = torch.tensor([[3.0, 4.0], [0.0, 2.0], [1.0, 1.0]], dtype=torch.float64)
    found = cosines(f, vectors, torch.tensor([True, True, False]))
    assert found.tolist() == [pytest.approx([0.6, 0, NEVER]), pytest.approx([1, 0.8, NEVER])]


def test_contrast_by_hand():
    # f = (3, 4) has norm 5: cosines 0.6 and 0.8 with the axes; temperature 0.5 gives logits 1.2 and 1.6.
    f = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    for y, own, other in ((0, 1.2, 1.6), (1, 1.6, 1.2)):
        expected = math.log(math.exp(own) + math.exp(other)) - own
        assert contrast(f, torch.tensor([y]), UNIT, BOTH, 0.5).item() == pytest.approx(expected)


def test_contrast_leaves_absent_classes_out():
    # Classes 0 and 2 have prototypes. Example 0 (class 0): softmax over two classes only; example 1 (class 1): nothing.
    vectors = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    present = torch.tensor([True, False, True])
    f = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    loss = contrast(f, torch.tensor([0, 1]), vectors, present, 0.5)
    assert loss[0].item() == pytest.approx(math.log(1 + math.exp(-2)))
    assert loss[1].item() == 0.0
    (gradient,) = torch.autograd.grad(loss.sum(), f)
    assert gradient[1].tolist() == [0.0, 0.0]
    assert torch.isfinite(gradient).all()


def test_contrast_gradient_by_hand():
    # loss = log(1 + exp((c1 - c0) / T)), c0 = a / r, c1 = b / r. At (a, b) = (1, 0): dc0 = 0, dc1/da = 0, dc1/db = 1,
    # so the gradient is (0, sigmoid(-1 / T) / T); T = 0.5.
    f = torch.tensor([[1.0, 0.0]], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(contrast(f, torch.tensor([0]), UNIT, BOTH, 0.5).sum(), f)
    assert gradient[0, 0].item() == pytest.approx(0.0, abs=1e-12)
    assert gradient[0, 1].item() == pytest.approx(2 / (1 + math.exp(2)))


def test_partners_are_the_next_rows():
    assert neighbours(Batch(torch.zeros(4, 1), torch.zeros(4))).tolist() == [1, 2, 3, 0]
    assert neighbours(Batch(torch.zeros(1, 1), torch.zeros(1))).tolist() == [0]


@pytest.mark.parametrize(
    ("mask", "expected"), [((1, 1, 1, 0), (1, 2, 0)), ((1, 0, 1, 1), (2, 3, 0)), ((0, 1, 0, 0), (1,))]
)
def test_padded_rows_are_nobodys_partner(mask, expected):
    rows = torch.tensor(mask, dtype=torch.float32)
    found = neighbours(Batch(torch.zeros(4, 1), torch.zeros(4), rows))
    assert tuple(found[rows > 0].tolist()) == expected
