"""A run of several widths whose nodes tell the width of their device is resumed exactly, whatever they tell then."""

import json

import pytest

from fedcross.client import workshop
from fedcross.client.app import app as client_app
from fedcross.conf.compose import join
from fedcross.engines.grid import LocalGrid
from fedcross.server.reply_log import WriteAheadLog
from fedcross.server.session import Session
from tests.support.federation import Quiet, run, same, settle

ROUNDS = 3
SETTINGS = (
    *("partition.clients=8", "clients_per_round=4", f"rounds={ROUNDS}", "checkpoint.log=true", "checkpoint.every=10"),
    *("model.hidden=[8]", "method.widths=[1.0,0.66,0.4]"),
)
POOL = "method.shares=[.5,.25,.25]"
SECONDS = ("seconds", "seconds_training", "seconds_aggregation")


class AskedGrid(LocalGrid):
    """A grid whose nodes are asked for their partition and width, as on a network; it stops after `left` replies."""

    def __init__(self, clients, settled, widths):
        super().__init__(client_app, clients, {"overrides": join(settled)})
        self.widths, self.partition_of, self.left, self.trained = widths, self.partitions, 10**6, []
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
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            config = message.content.config_records["config"]
            self.trained.append((config["round"], config["slot"], config["client"], config.get("width", 1.0)))
        return super()._carry_out(message)


def asked(folder, widths, *overrides):
    config, settled = settle(folder, *SETTINGS, *overrides)
    workshop._open.clear()
    return Session(config, AskedGrid(config.partition.clients, settled, widths), Quiet())


def stopped(folder, widths, after, *overrides):
    first = asked(folder, widths, *overrides)
    first.grid.left = after
    with pytest.raises(KeyboardInterrupt):
        first.execute()


def lines(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in SECONDS} for line in found]


@pytest.mark.parametrize("defence", ["true", "false"])
@pytest.mark.parametrize("method", ["fedcross", "fedfan", "heterofl", "adaptivefl"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, method, defence):
    """As the undisturbed one and the simulator's; the first process of each run knows all widths when it draws."""
    own = (f"method={method}", f"defence.enabled={defence}", *([POOL] if method.startswith("fed") else []))
    simulated = run(tmp_path / "simulated", *SETTINGS, *own, "devices=three_sizes")
    widths = dict(simulated.method.budgets)
    assert len(set(widths.values())) == 3
    whole = asked(tmp_path / "whole", widths, *own)
    whole.execute()
    assert same(whole.method.global_model(), simulated.method.global_model())
    asked_in_all = whole.grid.trained
    after = len([one for one in asked_in_all if one[0] == 1]) + 2
    stopped(tmp_path / "stopped", widths, after, *own)
    resumed = asked(tmp_path / "stopped", widths, *own, f"resume={tmp_path / 'stopped'}")
    resumed.execute()
    assert resumed.grid.trained == asked_in_all[after:]  # none twice, and all others as before
    assert same(resumed.method.global_model(), whole.method.global_model())
    assert lines(tmp_path / "stopped") == lines(tmp_path / "whole")


WIDTHS = dict(enumerate([0.4, 1.0, 0.66, 1.0, 0.4, 1.0, 0.66, 0.4]))
METHODS = [("fedcross", POOL), ("fedfan", POOL), ("heterofl",), ("adaptivefl",)]


@pytest.mark.parametrize("own", METHODS, ids=lambda own: own[0])
def test_devices_that_come_back_narrower_lose_no_logged_work(tmp_path, caplog, own):
    """The round is dealt as it was, with the replies of the log; nobody is asked for more than his device holds now."""
    own, folder = (f"method={own[0]}", *own[1:], "defence.enabled=true"), tmp_path / "run"
    whole = asked(tmp_path / "whole", WIDTHS, *own)
    whole.execute()
    stopped(folder, WIDTHS, 3, *own)
    resumed = asked(folder, dict.fromkeys(WIDTHS, 0.4), *own, f"resume={folder}")
    resumed.execute()
    assert "is not used" not in caplog.text
    assert all(width == 0.4 for *_, width in resumed.grid.trained)
    first = whole.grid.trained[3]
    late = [one for one in resumed.grid.trained if one[0] == 1]
    assert late == ([first] if first[-1] == 0.4 else [])  # the fourth slot, whose reply is not in the log
    _, slot, client, width = first
    lost = f"client {client} is not asked for slot {slot}: the model has width {width:g}, its device holds 0.4 now"
    assert (lost in caplog.text) == (width > 0.4)
    line = lines(folder)[0]
    assert line["dropped"] == (first[-1] > 0.4)
    assert sum(line["width_replies"].values()) == 4 - line["dropped"]


@pytest.mark.parametrize("defence", ["true", "false"])
@pytest.mark.parametrize("own", METHODS, ids=lambda own: own[0])
def test_replies_of_a_log_without_widths_that_fit_no_model_are_left_out(tmp_path, caplog, monkeypatch, own, defence):
    """A log of an earlier version, and devices that tell other widths than they did then."""
    own, folder = (f"method={own[0]}", *own[1:], f"defence.enabled={defence}"), tmp_path / "run"
    stopped(folder, WIDTHS, 3, *own)
    monkeypatch.setattr(WriteAheadLog, "widths", lambda self, number: None, raising=False)
    resumed = asked(folder, {**WIDTHS, 1: 0.4, 5: 0.4}, *own, f"resume={folder}")
    resumed.execute()
    unused = [one.getMessage() for one in caplog.records if "is not used" in one.getMessage()]
    assert unused
    assert all("fedcross: round 1: the logged reply of client " in one for one in unused)
    assert all(0 <= line["dropped"] <= 4 for line in lines(folder))


def test_a_log_without_widths_is_read_as_the_nodes_tell_them(tmp_path, monkeypatch):
    own, folder = ("method=fedcross", POOL), tmp_path / "run"
    whole = asked(tmp_path / "whole", WIDTHS, *own)
    whole.execute()
    stopped(folder, WIDTHS, 6, *own)
    monkeypatch.setattr(WriteAheadLog, "widths", lambda self, number: None, raising=False)
    resumed = asked(folder, WIDTHS, *own, f"resume={folder}")
    resumed.execute()
    assert same(resumed.method.global_model(), whole.method.global_model())
