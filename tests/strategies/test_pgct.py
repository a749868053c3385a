import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedcross.strategies.fedexg import GROUP
from fedcross.strategies.method import Upload
from fedcross.strategies.objective import Batch
from fedcross.strategies.pgct import PGCT
from tests.support.plain import PlainNet

AXES = {
    "host": torch.ones(()),
    "vectors": torch.eye(2, dtype=torch.float64),
    "present": torch.tensor([True, True]),
}


def held(vectors, present):
    return {"vectors": np.array(vectors, np.float32), "present": np.array(present)}


def loss(params, prepared=AXES):
    batch = Batch(torch.tensor([[3.0, 4.0]], dtype=torch.float64), torch.tensor([0]))
    net = PlainNet()
    return (
        PGCT.Objective(params).loss(net, {"scale": torch.tensor(1.0, dtype=torch.float64)}, {}, batch, prepared).item()
    )


def test_the_loss_by_hand():
    # f = (3, 4) are the logits, class 0: CE = log(1 + e). Contrast: cosines .6 and .8 over .5: log(1 + exp(.4)).
    # Attention a = softmax(1.2, 1.6): f' = (3 + a0, 4 + a1) / 2, CE' = log(1 + exp((1 + a1 - a0) / 2)).
    a1 = 1 / (1 + math.exp(-0.4))
    entropy = math.log(1 + math.e)
    contrast = math.log(1 + math.exp(0.4))
    attended = math.log(1 + math.exp((1 + a1 - (1 - a1)) / 2))
    assert loss(PGCT.Params(kappa=2, eta=3)) == pytest.approx(entropy + 2 * contrast + 3 * attended)
    assert loss(PGCT.Params(kappa=0, eta=3)) == pytest.approx(entropy + 3 * attended)
    assert loss(PGCT.Params(kappa=2, eta=0)) == pytest.approx(entropy + 2 * contrast)


def test_at_home_it_is_cross_entropy():
    assert loss(PGCT.Params(), prepared={}) == pytest.approx(math.log(1 + math.e))


def test_the_local_view_alone_travels():
    method = PGCT()
    mine, others = held([[1.0] * 3] * 2, [True, False]), held([[0.0] * 3] * 2, [True, True])
    state = SimpleNamespace(learners={i: Upload(i, i, {}, {GROUP: one}, 1, {}) for i, one in enumerate((mine, others))})
    sent = method.guidance(state, 0)[GROUP]
    assert sent["vectors"].tolist() == [[1.0] * 3] * 2
    assert sent["present"].tolist() == [True, False]  # what the client lacks is not filled from elsewhere


def test_without_its_terms_nothing_but_models_travels():
    assert not PGCT.Params(kappa=0, eta=0).uses_prototypes
    assert PGCT.Params(kappa=0).uses_prototypes
