"""A lost slot's model counts in FedCross's global mean (measured: docs/methods-fedcross.md, "Lost clients")."""

import numpy as np

from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Round, Upload
from tests.support.game import Game


def after_a_loss(**settings):
    """Return the method after a round in which all three slots trained and one in which slot 1 was lost."""
    method = Game(
        FedCross,
        {"w": np.zeros(1, np.float32)},
        {"w"},
        clients_per_round=3,
        alpha=0.75,
        selection="in_order",
        **settings,
    )
    for number, found in enumerate(({0: 1.0, 1: 11.0, 2: 3.0}, {0: 4.0, 2: 8.0}), start=1):
        uploads = [Upload(slot, slot, {"w": np.float32([w])}, {}, 1, {}) for slot, w in found.items()]
        method.aggregate(Round(number, 0, (0, 1, 2), 0), uploads)
    return method


def test_the_global_model_is_the_mean_of_all_slots_by_hand():
    """Round 1 leaves 3.5, 9, 2.5. Round 2: slots 0 and 2 mix to .75 4 + .25 8 = 5 and 7, slot 1 stays 9.

    The mean of all is 7, that of the two slots that trained would be 6.
    """
    method = after_a_loss()
    assert method.pool.rows.ravel().tolist() == [5.0, 9.0, 7.0]
    assert method.global_model()["w"] == 7.0


def test_the_mean_of_the_uploads_leaves_the_lost_slot_out():
    """As the public code: (4 + 8)/2 = 6 after round 2; slot 1's model plays no part."""
    method = after_a_loss(global_model="uploads")
    method.pool.rows[1] = 1000.0
    assert method.global_model()["w"] == 6.0
