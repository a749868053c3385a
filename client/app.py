"""The ClientApp: answers the server's messages. Does not import torch; only the process that trains does."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Callable, Sequence
from functools import lru_cache
from logging import WARNING
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.logger import log

from fedcross.core.errors import ConfigError, DeviceError, FedcrossError, ProtocolError
from fedcross.core.settings import overrides_of
from fedcross.strategies.wire.records import ORIGIN

#: The name of a device's width in its node's configuration.
WIDTH = "device.width"
#: The program in which Flower runs one message of a SuperNode.
PROGRAM = "flwr-clientapp"

#: The program that answers the messages of a SuperNode in one process (:mod:`engines.warm_device`).
EXECUTOR = "fedcross-executor"


class Client(ClientApp):
    """The ClientApp, with what :mod:`engines.warm_device.worker` asks of an app.

    Attributes
    ----------
    stays_loaded : bool
        True: it may answer many messages in one process.
    sound : bool
        False once an error has left the process, or its GPU, in an unknown state.
    """

    stays_loaded = True
    sound = True

    def prepare(self, context: Context) -> None:
        """Load what the run of `context` needs, before its next message comes."""
        from fedcross.client.cache import run_cache

        run_cache(_overrides(context))


def tell_partition(app: ClientApp) -> ClientApp:
    """Let the clients of `app` tell the server their partition, and return `app`.

    Clients are drawn and ordered by partition. Without this they are numbered by node id, which Flower draws at random,
    so that two runs with one seed differ.

    Parameters
    ----------
    app : ClientApp
        An app of Flower's Message API without a query handler of its own.

    Raises
    ------
    ConfigError
        In the client, if its node was started without ``partition-id``.
    """

    @app.query()
    def who(message: Message, context: Context) -> Message:
        partition = context.node_config.get("partition-id")
        if partition is None:
            raise ConfigError(
                "This node has no partition-id. Start it with --node-config 'partition-id=0 num-partitions=10'."
            )
        told = ConfigRecord({"partition-id": int(partition)})
        if WIDTH in context.node_config:
            told["device-width"] = device_width(context.node_config[WIDTH])
        return Message(RecordDict({"config": told}), reply_to=message)

    return app


def device_width(value: object) -> float:
    """Return the width of this device, the share of the model's channels that it can train, as its node has it.

    Raises
    ------
    ConfigError
        If it is no number above 0 and up to 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{WIDTH}={value!r} in the node's configuration: give a number above 0, up to 1.")
    return float(value)


app = Client()
tell_partition(app)


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train the received model on this node's data."""
    return _work("train", message, context)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score the received model on this node's own test data."""
    return _work("evaluate", message, context)


def _work(task: str, message: Message, context: Context) -> Message:
    """Do `task` in this process; over a network, an error becomes a reply that names its type, file and line."""
    from fedcross.client.request import LocalClient

    _check_addressee(message, context)
    try:
        return LocalClient(_overrides(context))(message, context)
    except Exception as error:
        app.sound = app.sound and isinstance(error, FedcrossError) and not isinstance(error, DeviceError)
        # Over a network the server believes an error only if it returns the request's nonce, which Flower's does not.
        if task != "train" or not (networked() or isinstance(error, ConfigError)):
            raise
        text = str(error) if isinstance(error, FedcrossError) else "".join(traceback.format_exception(error))
        log(WARNING, "fedcross: %s: %s", type(error).__name__, text)
        return Message(failure(message.content, error), reply_to=message)


def failure(asked_for: RecordDict, error: BaseException) -> RecordDict:
    """Return the content of the client's answer that says why it could not do what a message asked for.

    It has the error's type, message, file and line. Flower's own error replies do not name their request.
    """
    asked = asked_for.config_records["config"]
    file, line = place_of(error)
    told: dict[str, Any] = {"error": type(error).__name__, "detail": str(error)[:4000], "file": file, "line": line}
    return RecordDict({"config": ConfigRecord({name: asked[name] for name in ORIGIN} | told)})


def place_of(error: BaseException) -> tuple[str, int]:
    """Return file and line of the last frame of `error` in the user's code: outside of libraries and of fedcross.

    An error inside fedcross has its last frame there; one without frames has "" and 0.
    """
    frames = traceback.extract_tb(error.__traceback__)
    library = (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    code = [frame for frame in frames if not frame.filename.startswith(library)] or list(frames)
    package = str(Path(__file__).resolve().parents[2])
    own = [frame for frame in code if not str(Path(frame.filename).resolve()).startswith(package)] or code
    return (own[-1].filename, own[-1].lineno or 0) if own else ("", 0)


def _overrides(context: Context) -> str:
    nodes = context.node_config.get("num-partitions")
    return _settled(tuple(context.run_config.items()), None if nodes is None else int(nodes))


@lru_cache(maxsize=8)
def _settled(run_config: tuple[tuple[str, object], ...], nodes: int | None) -> str:
    return overrides_of(dict(run_config), nodes)


def networked() -> bool:
    """Return whether this process answers a SuperNode."""
    return Path(sys.argv[0]).name in {EXECUTOR, PROGRAM}


def _check_addressee(message: Message, context: Context) -> None:
    asked = message.content["config"]
    own = context.node_config.get("partition-id")
    if own is not None and int(own) != asked["client"]:
        raise ProtocolError(f"A request for client {asked['client']!r} reached the node of client {own}.")


def warm_for(overrides: str) -> Callable[[], tuple[bool, Sequence[int]]]:
    """Return a function that loads into this process what clients of the run `overrides` need.

    The function returns whether forks of this process may train (not on a GPU, whose driver does not survive a fork)
    and the number of examples of each client.
    """

    def warm() -> tuple[bool, Sequence[int]]:
        from fedcross.client.cache import run_cache
        from fedcross.client.device import pick_device
        from fedcross.conf.schema import load_text

        if pick_device(load_text(overrides).device).type != "cpu":
            return False, ()
        return True, [len(part) for part in run_cache(overrides).data.partition.train]

    return warm
