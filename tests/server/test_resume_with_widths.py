"""A run of several widths whose nodes tell the width of their device is resumed exactly, whatever they tell then."""

import json

import pytest

from fedcross.client import cache
from fedcross.client.app import app as client_app
from fedcross.conf.compose import join
from fedcross.engines.grid import LocalGrid
from fedcross.server.observers import Observer
from fedcross.server.session import Session
from fedcross.strategies.round.clock import budgets_of
from tests.support.federation import run, same, settle

ROUNDS = 3
SETTINGS = (
    *("partition.clients=8", "clients_per_round=4", f"rounds={ROUNDS}", "checkpoint.log=true", "checkpoint.every=10"),
    *("model.hidden=[8]", "method.widths=[1.0,0.66,0.4]"),
)
POOL = "method.shares=[.5,.25,.25]"
SECONDS = ("seconds", "seconds_training", "seconds_aggregation")


class AskedGrid(LocalGrid):
    """A grid whose nodes are asked for their partition and width, as on a network."""

    def __init__(self, clients, settled, widths):
        super().__init__(client_app, clients, {"overrides": join(settled)})
        self.widths, self.partition_of, self.trained = widths, self.partitions, []
        del self.partitions  # so the server does not know them without asking

    def get_node_ids(self):
        return list(self.partition_of)

    def _context(self, message):
        self.partitions = self.partition_of
        context = super()._context(message)
        del self.partitions
        client = self.partition_of[message.metadata.dst_node_id]
        told = {"device.width": self.widths[client]} if client in self.widths else {}
        context.node_config = {**context.node_config, **told}
        return context

    def _carry_out(self, message):
        if message.metadata.message_type == "train":
            config = message.content.config_records["config"]
            self.trained.append((config["round"], config["slot"], config["client"], config.get("width", 1.0)))
        return super()._carry_out(message)


def asked(folder, widths, *overrides):
    config, settled = settle(folder, *SETTINGS, *overrides)
    cache._open.clear()
    return Session(config, AskedGrid(config.partition.clients, settled, widths), Observer())


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in SECONDS} for line in found]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "defence"), [("fedcross", "true"), ("fedfan", "false"), ("heterofl", "true"), ("adaptivefl", "false")]
)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, method, defence):
    """As the undisturbed one and the simulator's; the first process of each run knows all widths when it draws."""
    own = (f"method={method}", f"defence.enabled={defence}", *([POOL] if method.startswith("fed") else []))
    simulated = run(tmp_path / "simulated", *SETTINGS, *own, "devices=three_sizes")
    widths = budgets_of(simulated.config.devices, simulated.config.seed, 8)
    assert len(set(widths.values())) == 3
    whole = asked(tmp_path / "whole", widths, *own)
    whole.execute()
    assert same(whole.driver.global_model(), simulated.driver.global_model())
    asked_in_all = whole.grid.trained
    asked(tmp_path / "stopped", widths, *own, "stop_at=1").execute()
    resumed = asked(tmp_path / "stopped", widths, *own, f"resume={tmp_path / 'stopped'}")
    resumed.execute()
    assert resumed.grid.trained == [one for one in asked_in_all if one[0] > 1]
    assert same(resumed.driver.global_model(), whole.driver.global_model())
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")
