"""A client's inputs on its device: pictures stay bytes on a GPU, and are prepared as on a CPU to the bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.reading.params import Normalise

CPU = torch.device("cpu")
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
