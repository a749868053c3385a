import numpy as np
import pytest
import torch

from fedcross.strategies.feddecorr import decorrelation
from tests.support.bench import descent, play, two_layers


def penalty_slope(z):
    """Return dD/dz for z of shape (n, 2).

    With c the centred columns, v_j = |c_j|^2 / (n - 1) + eps and P = c_1 . c_2 / sqrt(v_1 v_2): D = P^2 / n, for both
    off-diagonal entries are P and D is their mean. dP/dc_1 = c_2 / sqrt(v_1 v_2) - P c_1 / ((n - 1) v_1); it sums to
    zero, so it is dP/dz_1 too.
    """
    n = len(z)
    c = z - z.mean(0)
    v = (c**2).sum(0) / (n - 1) + 1e-8
    p = c[:, 0] @ c[:, 1] / np.sqrt(v[0] * v[1])
    slopes = [c[:, 1 - j] / np.sqrt(v[0] * v[1]) - p * c[:, j] / ((n - 1) * v[j]) for j in (0, 1)]
    return 2 * p / n * np.stack(slopes, axis=1)


def test_two_steps_by_hand():
    """z = F x, logits V z. Both gradients reach F: dF = (dCE/dz + beta dD/dz)^T X; V has only the cross-entropy's."""
    beta, lr = 0.3, 0.5
    f0, v0 = np.array([[1.0, 0.5], [0.2, 1.0]]), np.array([[0.5, -0.3], [0.1, 0.4]])
    data = [([[1.0, 0.0], [0.0, 1.0], [1.0, 2.0]], [0, 1, 0]), ([[0.0, 1.0], [2.0, 1.0]], [1, 1])]
    expected = []
    for xs, ys in data:
        x, f, v = np.array(xs), f0.copy(), v0.copy()
        for _ in range(2):
            z = x @ f.T
            slopes = [descent(v, row, y) for row, y in zip(z, ys)]
            dz = np.stack([slope for _, slope in slopes]) / len(ys) + beta * penalty_slope(z)
            f, v = f - lr * dz.T @ x, v - lr * np.mean([slope for slope, _ in slopes], axis=0)
        expected.append((f, v))
    method, _, uploads = play("feddecorr", two_layers(f0, v0), data, beta=beta)
    for upload, (f, v) in zip(uploads, expected):
        assert upload["features.weight"] == pytest.approx(f, abs=1e-13)
        assert upload["classifier.weight"] == pytest.approx(v, abs=1e-13)
    mean = (3 * expected[0][0] + 2 * expected[1][0]) / 5
    assert method.global_model()["features.weight"] == pytest.approx(mean, abs=1e-13)


def test_perfect_correlation_by_hand():
    """z_2 = 2 z_1 for three rows: standardised columns are equal, with square sum n - 1 = 2; D = 2^2 / 3."""
    z = torch.tensor([[1.0, 2.0], [2.0, 4.0], [6.0, 12.0]], dtype=torch.float64)
    assert decorrelation(z).item() == pytest.approx(4 / 3, rel=1e-6)


def test_padding_does_not_count():
    z = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.tensor([1.0, 1, 1, 1, 0])
    assert decorrelation(z, mask).item() == pytest.approx(decorrelation(z[:4]).item(), rel=1e-12)


@pytest.mark.parametrize("z", [torch.ones(1, 4), torch.ones(3, 4), torch.arange(3.0)[:, None]])
def test_nothing_to_correlate_is_0_with_a_finite_gradient(z):
    z.requires_grad_()
    value = decorrelation(z)
    value.backward()
    assert value == 0
    assert torch.isfinite(z.grad).all()


def test_padding_alone_is_0():
    assert decorrelation(torch.rand(4, 3), torch.zeros(4)) == 0
