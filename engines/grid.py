"""A Flower Grid for clients on this machine, shared by the local engine, its workers and the batched engine."""

from __future__ import annotations

import traceback
import uuid
from bdb import BdbQuit
from collections.abc import Iterable, Mapping
from logging import WARNING
from traceback import format_exception
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.core.errors import DeviceError, FedcrossError
from fedcross.engines import flower_private
from fedcross.engines.job import Answer, Job

#: Flower's code for an exception in a ClientApp.
CLIENT_APP_RAISED = 2
RUN_ID = 1
SERVER_NODE = 1
FIRST_NODE = 1_000_000


class LocalGrid(Grid):
    """A Flower Grid that calls `client`, a ClientApp for example, in this process, once per message.

    Node ``FIRST_NODE + i`` of the `clients` nodes holds partition ``i`` and has `run_config` in its context.
    """

    #: Whether :meth:`pull_messages` waits until a reply exists, so that callers need not wait between two calls.
    #: Strategies read this and ``partitions`` of a grid on this machine (their ``LocalClients``).
    blocking = True

    def __init__(self, client: Answer, clients: int, run_config: Mapping[str, str]) -> None:
        identify()
        self._client = client
        self._clients = clients
        self._run_config = dict(run_config)
        self._states: dict[int, RecordDict] = {}
        self._queue: dict[str, Message] = {}
        self._run: Any = None
        #: Node id -> partition id; the grid knows it without asking the nodes.
        self.partitions = {FIRST_NODE + i: i for i in range(clients)}

    def set_run(self, run: Any) -> None:
        """Set :attr:`run`."""
        self._run = run

    @property
    def run(self) -> Any:
        """The run given to :meth:`set_run`; None before."""
        return self._run

    def create_message(
        self, content: RecordDict, message_type: str, dst_node_id: int, group_id: str, ttl: float | None = None
    ) -> Message:
        """Return a message to a node (part of Flower's interface for older apps)."""
        return Message(content, dst_node_id=dst_node_id, message_type=message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of all nodes; local nodes are always online."""
        return list(self.partitions)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Queue `messages`; the client answers them when their replies are pulled."""
        ids = []
        for message in messages:
            message_id = uuid.uuid4().hex
            message.metadata.__dict__["_message_id"] = message_id
            self._queue[message_id] = message
            ids.append(message_id)
        return ids

    def pull_messages(
        self, message_ids: Iterable[str] | None = None, *, reply_to_message_ids: Iterable[str] | None = None
    ) -> Iterable[Message]:
        """Carry out the first queued message among these and return its reply.

        Flower up to 1.42 calls the first argument `message_ids`; None means all messages.
        """
        ids = message_ids if reply_to_message_ids is None else reply_to_message_ids
        return self._pull(set(self._queue if ids is None else ids))

    def _pull(self, asked: set[str]) -> list[Message]:
        for message_id in list(self._queue):
            if message_id in asked:
                return [self._carry_out(self._queue.pop(message_id))]
        return []

    def forget(self, message_ids: Iterable[str]) -> None:
        """Drop those of these messages that no client has answered: nobody pulls their replies any more."""
        for message_id in message_ids:
            self._queue.pop(message_id, None)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Carry out `messages` and return all replies."""
        missing = set(self.push_messages(messages))
        replies: list[Message] = []
        while len(replies) < len(missing):
            replies += self.pull_messages(missing)
        return replies

    def close(self) -> None:
        """Do nothing: this grid has no processes to end."""

    def _carry_out(self, message: Message) -> Message:
        return answer(self._client, message, self._context(message))

    def _context(self, message: Message) -> Context:
        node = message.metadata.dst_node_id
        return Context(
            run_id=RUN_ID,
            node_id=node,
            node_config={"partition-id": self.partitions[node], "num-partitions": self._clients},
            state=self._states.setdefault(node, RecordDict()),
            run_config=dict(self._run_config),
        )


#: Errors of clients whose traceback has been printed: their type and the line that raised them.
_printed: set[tuple[type, object]] = set()


def answer(client: Answer, message: Message, context: Context) -> Message:
    """Return the reply of `client` to `message`; an exception becomes an error reply, as in Flower.

    The first exception of its kind is logged with its traceback.

    Raises
    ------
    DeviceError
        If this process cannot use its GPU any more: every later message would fail too.
    KeyboardInterrupt
        If somebody quits a debugger.
    """
    try:
        return client(message, context)
    except DeviceError:
        raise
    except BdbQuit:
        raise KeyboardInterrupt from None
    except Exception as error:  # noqa: BLE001 - a client's fault, whatever it is, must not end the federation
        told = f"{type(error).__name__}: {error}"
        place = type(error), traceback.extract_tb(error.__traceback__)[-1].line
        whole = told if place in _printed or isinstance(error, FedcrossError) else "".join(format_exception(error))
        _printed.add(place)
        log(WARNING, "client %s: %s", context.node_config["partition-id"], whole.rstrip())
        return Message(Error(CLIENT_APP_RAISED, told), reply_to=message)


def identify() -> None:
    """Set Flower's identity of this process, which ``Message`` reads."""
    flower_private.identify(RUN_ID, SERVER_NODE, 1)


def serve(job: Job, grid: Grid) -> None:
    """Run the ServerApp of `job` on `grid`."""
    job.server_app(grid, Context(RUN_ID, SERVER_NODE, {}, RecordDict(), {"overrides": job.overrides}))
