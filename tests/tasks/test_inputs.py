"""A client's inputs on its device: pictures stay bytes on a GPU, and are prepared as on a CPU to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.reading.params import Normalise, token_ids
from tests.support.emulated_gpu import emulated_gpu

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
#: As in conf/task: digits, FEMNIST (inverted), CIFAR-10, ImageNet's statistics.
SETTINGS = {
    "digits": Normalise((0.5,), (0.5,), 16.0),
    "inverted": Normalise((1.0,), (-1.0,), 255.0),
    "cifar10": Normalise((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 255.0),
    "channels": Normalise((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 255.0),
}


def test_bytes_are_prepared_by_hand() -> None:
    """0, 51, 255 are 0, .2, 1 of the scale: (0 - .5) / .25 = -2, (.2 - .5) / .25 = -1.2, (1 - .5) / .25 = 2."""
    held = torch.tensor([[[[0]]], [[[51]]], [[[255]]]], dtype=torch.uint8)
    inputs = Inputs(held, Prepare(Normalise((0.5,), (0.25,), 255.0), 4, CPU))
    assert inputs[:].flatten().tolist() == pytest.approx([-2, -1.2, 2], abs=1e-6)
    assert inputs[torch.tensor([2, 0])].flatten().tolist() == pytest.approx([2, -2], abs=1e-6)
    assert inputs[1:].dtype == torch.float32
    assert (len(inputs), inputs.nbytes) == (3, 3)
    assert held.flatten().tolist() == [0, 51, 255]


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("last", [False, True])
def test_every_byte_is_prepared_as_the_task_does_to_the_bit(name: str, last: bool) -> None:
    """Also in channels last, whose layout stays."""
    normalise = SETTINGS[name]
    channels = len(normalise.mean)
    raw = np.arange(256, dtype=np.uint8).repeat(4 * channels).reshape(256, 2, 2, channels).transpose(0, 3, 1, 2)
    layout = torch.channels_last if last else torch.contiguous_format
    held = torch.from_numpy(np.ascontiguousarray(raw)).contiguous(memory_format=layout)
    found = Inputs(held, Prepare(normalise, 4, CPU))[:]
    assert torch.equal(found, normalise(raw))
    assert found.is_contiguous(memory_format=layout)


def test_a_fused_multiply_add_would_give_other_bits() -> None:
    """One rounding in place of two: the test above can tell them apart."""
    normalise, held = SETTINGS["channels"], torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).expand(-1, 3, 1, 1)
    factor, offset = (term.double() for term in normalise.terms(4))
    once = (held.double() * factor + offset).float()
    assert not torch.equal(once, Prepare(normalise, 4, CPU)(held))
    torch.testing.assert_close(once, Prepare(normalise, 4, CPU)(held))


def test_only_pictures_that_are_normalised_stay_bytes_and_only_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = np.arange(32, dtype=np.uint8).reshape(2, 1, 4, 4)
    numbers, tokens = pictures.astype(np.float32), np.array([[1, 2], [3, 4]], np.int32)
    normalise = SETTINGS["inverted"]

    def own(raw: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(raw)).double()

    cases = [
        (pictures, normalise, torch.uint8),
        (numbers, normalise, torch.float32),
        (tokens, token_ids, torch.int64),
        (pictures, own, torch.float64),
    ]
    with emulated_gpu(monkeypatch):
        for raw, prepare, kind in cases:
            there, here = Inputs.of(raw, prepare, GPU), Inputs.of(raw, prepare, CPU)
            assert (there.held.dtype, there.held.device) == (kind, GPU)
            assert (there.prepare is None) == (kind != torch.uint8)
            assert here.prepare is None
            assert torch.equal(there[:].cpu(), here[:])
            assert torch.equal(here[:], prepare(raw))


def test_preparations_are_equal_if_they_do_the_same() -> None:
    """They are part of the key under which a recorded step is found."""
    same = [Prepare(SETTINGS["channels"], 4, CPU) for _ in range(2)]
    others = [Prepare(SETTINGS["cifar10"], 4, CPU), Prepare(SETTINGS["channels"], 4, torch.device("meta"))]
    assert same[0] == same[1]
    assert len({*same, *others}) == 3
    assert same[0] != None  # noqa: E711 - the inputs of others have none
