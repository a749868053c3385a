"""Repeated, replayed and spoofed replies, a thousand of each, in virtual time; over a real network: test_network."""

from collections import Counter

import numpy as np
from flwr.app import ConfigRecord, Message

from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Start
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings
from tests.support.scale import size
from tests.support.virtual import Clock, VirtualGrid, trained

CLIENTS, PER_ROUND = 4, 25
ROUNDS = 2 + size(25, 1000) // PER_ROUND
MODEL = {"w": np.zeros(50, np.float32)}


class Impostor:
    """What client 3 sends besides, or instead of, its own reply, 25 replies a round."""

    def __init__(self, kind):
        self.kind, self.sent, self.old, self.open = kind, 0, None, []

    def poison(self, message, *, nonce=None):
        answer = trained(message, 1000.0)
        if nonce is not None:
            config = answer.content.config_records["config"]
            answer.content["config"] = ConfigRecord({**config, "nonce": nonce})
        self.sent += 1
        return answer

    def __call__(self, message):
        """Duplicate: poison after the own reply. The others come first: what it sent before, and in others' names."""
        own = [(2.0, trained(message))]
        if self.kind == "duplicate":
            return own + [(2.0, self.poison(message)) for _ in range(PER_ROUND)]
        if self.kind == "replay":
            old, self.old = self.old, trained(message, 1000.0)
            if old is None:
                return own
            self.sent += PER_ROUND
            return [(0.5, Message(old.content, reply_to=message)) for _ in range(PER_ROUND)] + own
        nonce = message.content.config_records["config"]["nonce"]
        spoofed = [self.poison(other, nonce=nonce) for other in self.others(message)]
        for one in spoofed:
            one.metadata.__dict__["_src_node_id"] = message.metadata.dst_node_id
        return [(0.5, one) for one in spoofed] + own

    def others(self, message):
        """Return requests to other clients; the ids of messages are no secret of this test."""
        return [self.open[i % len(self.open)] for i in range(PER_ROUND)]


class Leaking(VirtualGrid):
    """A grid that shows the impostor every request."""

    impostor = None

    def push_messages(self, messages):
        messages = list(messages)
        self.impostor.open = [one for one in messages if one.content.config_records["config"]["client"] != 3]
        return super().push_messages(messages)


def attacked(monkeypatch, kind):
    """Return the pool, the rejections and how many bad replies were sent."""
    settings = RoundSettings(clients_per_round=CLIENTS, nonce=True, deadline_s=100, run="r", rounds=ROUNDS)
    start = Start(MODEL, tuple(MODEL), CLIENTS, ROUNDS, settings.seed)
    driver = open_run(FedCross(selection="in_order", alpha=0.9), start, settings)
    impostor = Impostor(kind)
    grid = Leaking(Clock(monkeypatch), CLIENTS, {3: impostor} if kind else {})
    grid.impostor = impostor
    told: Counter[str] = Counter()
    for number in range(1, ROUNDS + 1):
        report = driver.run_round(number, grid)
        assert report.dropped == 0, number  # the true replies come too, and win
        told.update(report.rejected)
    return driver.state.pool.rows.copy(), told, impostor.sent


def test_none_is_accepted(monkeypatch):
    quiet, told, _ = attacked(monkeypatch, None)
    assert not told
    for kind, reasons in {
        "duplicate": {"duplicate"},
        "replay": {"wrong_nonce"},
        "spoof": {"wrong_node"},
    }.items():
        pool, told, sent = attacked(monkeypatch, kind)
        print(f"{kind}: {sent} sent, 0 accepted, {dict(told)}")  # seen with pytest -s
        assert sent >= size(25, 1000)
        assert (pool == quiet).all()
        assert set(told) <= {*reasons, "unknown"}
        # What arrives after a round's end is nobody's in the next one, or never looked at after the last.
        assert sent - PER_ROUND <= told.total() <= sent
