"""A SuperNode without its ClientApp process: Flower's own connection, heartbeats and retries, a client of ten lines.

::

    python -m tests.support.light_node PORT ROOT_CERTIFICATE LOG NODE_KEY=PARTITION ...

runs one thread per node against the SuperLink (or a proxy) on loopback. The client adds noise that depends on round and
partition only, so a run's result is known without any network, and a message costs milliseconds, not the start of a
process. LOG gets a line for every message: time, partition, round. With ``FEDCROSS_ATTACK`` the node sends further
replies (:mod:`tests.support.impostor`), with ``FEDCROSS_OTHER_SHAPE`` its models have twice the rows.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects, push_objects
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.fleet_http_connection import http_request_response

from fedcross.core.randomness import stream
from fedcross.strategies.wire.protocol import reply
from fedcross.strategies.wire.records import views

if TYPE_CHECKING:
    from tests.support.bombs import Bomber
    from tests.support.impostor import Impostor
    from tests.support.trees import Announcer

app = ClientApp()
#: Flower's Message reads its sender from a variable of the process.
_IDENTITY = threading.Lock()
#: Seconds between two questions for a message: this share of the time since the last one, within bounds. The SuperLink
#: needs some 10 ms of a core for each, and a round may wait for a minute.
SHARE, LEAST_S, MOST_S = 0.2, 0.1, 1.5


@app.query()
def who(message: Message, context: Context) -> Message:
    """Tell which partition this is."""
    record = ConfigRecord({"partition-id": int(context.node_config["partition-id"])})
    return Message(RecordDict({"config": record}), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Add noise that depends on seed, round and client only."""
    asked: dict[str, Any] = dict(message.content.config_records["config"])
    generator = stream(7, "light client", asked["round"], asked["exchange"], asked["client"])
    model = {}
    for name, values in sorted(views(message.content.array_records["arrays"]).items()):  # packed or not: one order
        model[name] = values + np.float32(0.01) * generator.standard_normal(values.shape).astype(values.dtype)
    if os.environ.get("FEDCROSS_OTHER_SHAPE"):  # a device with another model
        model = {name: np.repeat(values, 2, axis=0) for name, values in model.items()}
    time.sleep(float(os.environ.get("FEDCROSS_TRAINING", "0")))
    return reply(message, model, {}, 10, {"train-loss": 1.0})


class Connection:
    """What one node can do on Flower's Fleet API."""

    def __init__(self, functions: tuple[Any, ...], partition: int) -> None:
        self.node, self.receive, self._send, _, _, self._pull, self._push, self._confirm = functions
        self.partition = partition

    def next(self) -> Message | None:
        """Return the next message for this node, None if there is none."""
        received = self.receive()
        if received is None:
            return None
        header, tree = received
        run, number = header.metadata.run_id, header.metadata.message_id
        contents = pull_objects(
            [branch.object_id for branch in iterate_object_tree(tree)], lambda one: self._pull(run, one)
        )
        self._confirm(run, number)
        message: Message = inflate_object_from_contents(number, contents)
        message.metadata.__dict__["_message_id"] = number
        return message

    def answer(self, message: Message, act: Any = app) -> Message:
        """Return what `act` makes of `message`, as this node's reply."""
        context = Context(message.metadata.run_id, self.node, {"partition-id": self.partition}, RecordDict(), {})
        with _IDENTITY:
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = message.metadata.run_id, self.node, 1
            found: Message = act(message, context)
        return found

    def send(self, message: Message) -> None:
        """Send a reply."""
        with no_object_id_recompute():
            message.metadata.__dict__["_message_id"] = message.object_id
            objects, tree = get_all_nested_objects(message), get_object_tree(message)
            wanted, session = self._send(message, tree, 0.0)
            run = message.metadata.run_id
            push_objects(objects, lambda one, data: self._push(run, session, one, data), object_ids_to_push=wanted)


def serve(port: int, root: bytes, key: Path, partition: int, log: Path) -> None:
    """Work for ever as the node of `partition`."""
    private = load_ssh_private_key(key.read_bytes(), None)
    with http_request_response(
        f"127.0.0.1:{port}",
        False,
        root,
        (private, private.public_key()),  # type: ignore[arg-type]
    ) as functions:
        connection = Connection(functions, partition)
        attack: Bomber | Impostor | Announcer | None = None
        if kind := os.environ.get("FEDCROSS_ATTACK"):
            from tests.support.bombs import Bomber
            from tests.support.impostor import Impostor
            from tests.support.trees import Announcer

            if kind == "bomb":
                attack = Bomber(connection)
            elif kind == "trees":
                attack = Announcer(connection, int(os.environ["FEDCROSS_LEVELS"]))
            else:
                attack = Impostor(kind, connection, log)
        last = time.monotonic()
        while True:
            try:
                message = connection.next()
            except Exception as error:  # noqa: BLE001 - a message of a run that is over, say; a SuperNode goes on
                print(f"could not receive: {type(error).__name__}: {error}", flush=True)
                message = None
            if message is None:
                time.sleep(min(MOST_S, max(LEAST_S, SHARE * (time.monotonic() - last))))
                continue
            last = time.monotonic()
            train = message.metadata.message_type == "train"
            with log.open("a") as file:
                number = message.content.config_records["config"]["round"] if train else 0
                file.write(f"{time.time():.3f} {partition} {number}\n")
            if train:
                with log.with_suffix(".requests").open("a") as file:
                    meta = message.metadata
                    file.write(f"{meta.group_id} {meta.message_id} {connection.node}\n")
            honest = connection.answer(message)
            try:
                if attack is not None and train:
                    attack.act(message, honest)
                elif attack is not None and hasattr(attack, "asked_who"):
                    attack.asked_who(message, honest)
                else:
                    connection.send(honest)
            except Exception as error:  # noqa: BLE001 - a SuperNode drops what it could not send, and goes on
                print(f"could not send: {type(error).__name__}: {error}", flush=True)


def main() -> None:
    """Serve all nodes, each in a thread of its own; a node that fails ends the process."""
    port, root, log, *nodes = sys.argv[1:]

    def work(key: str, partition: str) -> None:
        try:
            serve(int(port), Path(root).read_bytes(), Path(key), int(partition), Path(log))
        finally:
            os._exit(1)

    for node in nodes:
        threading.Thread(target=work, args=node.rsplit("=", 1), daemon=True).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
