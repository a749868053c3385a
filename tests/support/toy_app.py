"""A Flower app small enough to test engines: the server asks every client who it is and writes the answers down."""

from __future__ import annotations

from pathlib import Path

CLIENT = """
import os

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    record = ConfigRecord({
        "partition": int(context.node_config["partition-id"]),
        "partitions": int(context.node_config["num-partitions"]),
        "overrides": str(context.run_config["overrides"]),
        "path": os.environ["FEDCROSS_PATH"],
    })
    return Message(RecordDict({"reply": record}), reply_to=message)
"""

SERVER = """
import json
import shlex
import time
from pathlib import Path

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    output, mode, clients, *_ = shlex.split(context.run_config["overrides"])
    if mode == "fail":
        raise RuntimeError("the server fails on purpose")
    if mode == "hang":
        Path(output).write_text("started")
        time.sleep(600)
    deadline = time.monotonic() + 600
    while len(nodes := list(grid.get_node_ids())) < int(clients) and time.monotonic() < deadline:
        time.sleep(0.2)
    ask = RecordDict({"ask": ConfigRecord({"who": 1})})
    messages = [Message(ask, dst_node_id=node, message_type="query") for node in nodes]
    replies = grid.send_and_receive(messages, timeout=600)
    print("the server is done")
    Path(output).write_text(json.dumps([dict(reply.content["reply"]) for reply in replies]))
"""


PYPROJECT = """[project]
name = "toy"
version = "0.1.0"
description = "An app of the tests"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "test"

[tool.flwr.app.components]
serverapp = "toy.server:app"
clientapp = "toy.client:app"

[tool.flwr.app.config]
overrides = ""
"""


def write(folder: Path) -> Path:
    """Write the app into `folder` and return it."""
    files = {"toy/__init__.py": "", "toy/client.py": CLIENT, "toy/server.py": SERVER, "pyproject.toml": PYPROJECT}
    (folder / "toy").mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text.lstrip())
    return folder
