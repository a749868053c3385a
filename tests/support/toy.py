"""A ClientApp without torch, for tests of grids: adds one to its array, or fails the way its message says."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcross.core.settings import DEVICE
from fedcross.engines.grid import FIRST_NODE

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    asked = message.content.config_records["config"]
    how = asked.get("how", "")
    if how == "raise":
        raise ValueError("on purpose")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "sleep":
        time.sleep(600)
    run = 0  # that of a message of its own, if it makes one
    if how == "make":
        run = Message(RecordDict(), dst_node_id=message.metadata.src_node_id, message_type="train").metadata.run_id
    before = context.state.config_records.get("seen", ConfigRecord({"times": 0}))
    times = int(before["times"]) + 1
    context.state["seen"] = ConfigRecord({"times": times})
    array = message.content.array_records["arrays"]["w"].numpy() + 1
    content = RecordDict(
        {
            "arrays": ArrayRecord({"w": Array(array)}),
            "config": ConfigRecord(
                {
                    "times": times,
                    "pid": os.getpid(),
                    "who": context.node_config["partition-id"],
                    "device": os.environ.get(DEVICE, ""),
                    "run": run,
                }
            ),
        }
    )
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    return Message(RecordDict({"metrics": MetricRecord({"accuracy": 0.5})}), reply_to=message)


def message(client: int, how: str = "", length: int = 3, kind: str = "train") -> Message:
    """Return a request to `client` with an array of `length` numbers; `how` says what goes wrong."""
    content = RecordDict(
        {"arrays": ArrayRecord({"w": Array(np.full(length, float(client)))}), "config": ConfigRecord({"how": how})}
    )
    return Message(content, dst_node_id=FIRST_NODE + client, message_type=kind)
