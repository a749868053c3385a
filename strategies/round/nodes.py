"""Which node holds which partition.

Flower's node ids are random, so nothing here depends on them: clients are drawn and ordered by partition id. The server
asks every node once for its partition id, with a ``query`` message. Once the first round has begun, it waits for a
node's answer at most once: a node that is silent is left out until it answers, and makes no later round longer. For a
node that joins later and whose key was registered for a partition it does not wait at all.

A node's answer is a claim. A key that was registered for a partition (``fedcross deploy register --partition``) holds
that one and no other. Once such a key has been seen, keys that were registered for none are refused: else one of them
would get a partition while its device is away. In a federation without such keys, the first node keeps a partition as
long as it is connected; when the server has just started, the one that was registered first. Further claims are
refused, logged and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging import ERROR, INFO, WARNING, LogRecord
from typing import Any, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid

from fedcross.core.errors import FederationError
from fedcross.core.trust.admission import bound_partition, fingerprint
from fedcross.strategies.round.exchange import LocalClients, receive

#: Seconds that one refresh waits for answers.
QUERY_WAIT_S = 30.0
#: Seconds after which a node that has not answered is asked again.
QUERY_OPEN_S = 300.0
#: Most nodes that one line of the log names.
MOST_NAMED = 5
#: Flower's error code for an exception in the ClientApp. Other codes are lost nodes and crashes: those are asked again.
NO_ANSWER_TO_QUERIES = 2
#: What Flower's simulation logs, with two tracebacks, for a node whose ClientApp has no handler for queries.
EXPECTED_FAULT = "No query function registered"
EXPECTED_HEAD = "An exception was raised when processing a message by"


@runtime_checkable
class Listing(Protocol):
    """A grid that tells more of its nodes than their ids, as Flower's grid of a deployment does."""

    def get_nodes(self) -> Iterable[Any]:
        """Return Flower's ``NodeInfo`` of each connected node."""


class Nodes:
    """The nodes that are connected now.

    Parameters
    ----------
    on_refused : callable, optional
        Called once for every refused claim, with the partition.
    on_waiting : callable, optional
        Called when too few clients are connected: how many are, how many are needed, for how many seconds to wait.

    Attributes
    ----------
    online : dict of int to int
        Partition id -> node id, in the order of the partition ids; as of the last :meth:`refresh`.
    """

    def __init__(
        self,
        on_refused: Callable[[int], None] = lambda _: None,
        on_waiting: Callable[[int, int, float], None] = lambda *_: None,
    ) -> None:
        self._on_waiting = on_waiting
        self.online: dict[int, int] = {}
        #: Node id -> width of its device, where it told one (``device.width`` in the node's configuration).
        self._widths: dict[int, float] = {}
        #: Node id -> fingerprint of the key that was registered for it, where the SuperLink tells it.
        self.keys: dict[int, str] = {}
        self._on_refused = on_refused
        self._bound: dict[int, int | None] = {}  # node -> the partition that its key was registered for
        self._registered: dict[int, str] = {}  # node -> when its key was registered
        self._refused: set[tuple[int, int]] = set()  # claims that were refused before: node, partition
        self._partition_of: dict[int, int] = {}
        self._sorted: list[int] = []
        self._last: list[int] | None = None  # connected nodes when the two above were made; None unless all were known
        self._told: set[bool] = set()  # what was logged about nodes that do not tell their partition
        self._asked: dict[str, tuple[int, float]] = {}  # open queries: message id -> node, until when it may answer
        self._gathering = True  # until enough clients were there for a first round
        self._until: dict[int, float] = {}  # node -> until when a refresh waits for its answer
        self._silent: set[int] = set()  # nodes that did not answer in that time, as the log has said

    def width(self, partition: int) -> float | None:
        """Return the width that the partition's holder has told of its device; None if it, or the holder, told none.

        Kept by node: a device whose claim to the partition was refused says nothing of another one's.
        """
        return self._widths.get(self.online.get(partition, -1))

    def widths(self) -> dict[int, float]:
        """Return partition -> width of its device, for the connected ones whose holder has told one."""
        return {one: self._widths[node] for one, node in self.online.items() if node in self._widths}

    def refresh(self, grid: Grid) -> list[int]:
        """Get the connected nodes from the grid, ask new ones for their partition, return the sorted partition ids."""
        if isinstance(grid, LocalClients):
            self._partition_of = grid.partitions
        ids = list(grid.get_node_ids())
        if ids == self._last:  # same nodes as last time, all known: fast even with 10,000 clients
            return list(self._sorted)
        online = set(ids)
        new = sorted(online - self._partition_of.keys())
        if new:
            self._look_up(grid)
            self._partition_of.update(self._ask(grid, new, 1 + max(self._partition_of.values(), default=-1)))
        self._last = ids if online <= self._partition_of.keys() else None
        self.online = self._holders(online)
        self._sorted = sorted(self.online)
        return list(self._sorted)

    def _look_up(self, grid: Grid) -> None:
        """Learn which partitions keys were registered for, and when."""
        for node in grid.get_nodes() if isinstance(grid, Listing) else ():
            self._bound[node.node_id] = bound_partition(node.name)
            self._registered[node.node_id] = node.registered_at
            if key := bytes(getattr(node, "public_key", b"")):
                self.keys[node.node_id] = fingerprint(key)

    def _holders(self, online: Collection[int]) -> dict[int, int]:
        """Return partition -> the node that holds it, in the order of the partitions; refuse all other claims."""
        claims: dict[int, list[int]] = {}
        binding = any(bound is not None for bound in self._bound.values())
        for node, partition in self._partition_of.items():  # in the order of their answers
            bound = self._bound.get(node)
            if node not in online:
                continue
            if binding and bound != partition:
                told = "no partition, others' are" if bound is None else f"partition {bound}"
                self._refuse(node, partition, f"its key is registered for {told}")
            else:
                claims.setdefault(partition, []).append(node)
        found = {}
        for partition, nodes in sorted(claims.items()):
            found[partition] = holder = nodes[0] if len(nodes) == 1 else min(nodes, key=self._rank)
            for node in nodes:
                if node != holder:
                    self._refuse(node, partition, f"node {holder} holds it")
        return found

    def _rank(self, node: int) -> tuple[bool, bool, str]:
        """Return the place of `node` among those that claim its partition; of equal ones, the first to answer leads."""
        since = self._registered.get(node, "")
        holds = self.online.get(self._partition_of[node]) == node
        return not holds, not since, since

    def _refuse(self, node: int, partition: int, why: str) -> None:
        if (node, partition) in self._refused:
            return
        self._refused.add((node, partition))
        log(WARNING, "fedcross: node %s claims partition %s, refused: %s", node, partition, why)
        self._on_refused(partition)

    def wait_for(self, grid: Grid, count: int, wait_s: float, wanted: Collection[int] = ()) -> list[int]:
        """Refresh until `count` partitions and all `wanted` ones are online or `wait_s` seconds have passed.

        Raises
        ------
        FederationError
            If fewer than `count` are online after `wait_s` seconds; at once in a simulation that has fewer nodes.
        """
        deadline, told = time.monotonic() + wait_s, False
        while True:
            partitions = self.refresh(grid)
            over = time.monotonic() >= deadline
            if len(partitions) < count and simulated(grid) and len(list(grid.get_node_ids())) < count:
                raise FederationError(
                    f"{len(partitions)} clients are simulated, {count} are needed, and no more will come. "
                    f'Say how many: flwr run --federation-config "num-supernodes={count}".'
                )
            if len(partitions) < count and not (over or told):
                told = True
                self._on_waiting(len(partitions), count, wait_s)
                log(INFO, "fedcross: %d of %d clients are connected, waiting %.0f s", len(partitions), count, wait_s)
            if len(partitions) >= count and (over or set(wanted) <= set(partitions)):
                self._gathering = False
                return partitions
            if over:
                raise FederationError(
                    f"{len(partitions)} clients are connected after {wait_s:.0f} s, {count} are needed."
                    f"{self._missing(grid)} Start more clients, raise federation.wait_s or lower "
                    "federation.min_clients."
                )
            time.sleep(0.5)

    def _ask(self, grid: Grid, nodes: list[int], first: int) -> dict[int, int]:
        """Return node id -> partition id; nodes that have not replied are left for the next refresh.

        A slow device may reply after :data:`QUERY_WAIT_S`: its query stays open, and it is not asked again meanwhile;
        each refresh looks for the reply, and once a first round has begun none waits for it any more.
        Nodes of another app, which reply with an exception because they do not know this query, are numbered in the
        order of their node ids, from `first` on.
        """
        found: dict[int, int] = {}
        foreign: list[int] = []
        now = time.monotonic()
        self._asked = {key: (node, until) for key, (node, until) in self._asked.items() if until > now}
        waiting = {node for node, _ in self._asked.values()}
        asked = {
            node: Message(RecordDict({"config": ConfigRecord({})}), dst_node_id=node, message_type=MessageType.QUERY)
            for node in nodes
            if node not in waiting
        }
        for message_id, node in zip(grid.push_messages(asked.values()), asked):
            if message_id:  # else it could not be sent
                self._asked[message_id] = node, now + QUERY_OPEN_S
        pending = {message_id: node for message_id, (node, _) in self._asked.items()}
        replies = self._answers(grid, pending, now)
        for reply in replies:
            node = pending[reply.metadata.reply_to_message_id]
            del self._asked[reply.metadata.reply_to_message_id]
            if reply.has_error():
                if reply.error.code == NO_ANSWER_TO_QUERIES:
                    foreign.append(node)
                continue
            config = reply.content.config_records.get("config", ConfigRecord({}))
            partition = config.get("partition-id", -1)
            if isinstance(partition, int) and not isinstance(partition, bool) and partition >= 0:
                found[node] = partition
                self._note_width(node, config.get("device-width"))
        if foreign:
            self._tell_foreign(len(foreign), numbered=not found)
        if foreign and not found:
            return {node: first + index for index, node in enumerate(sorted(foreign))}
        return found

    def _answers(self, grid: Grid, pending: Mapping[str, int], now: float) -> list[Message]:
        """Return the answers to these queries, message id -> node; after the start, wait for each node at most once."""
        for node in pending.values():
            if self._gathering:  # nothing can begin without them
                self._until[node] = now + QUERY_WAIT_S
            bound = self._bound.get(node) is not None
            self._until.setdefault(node, now if bound else now + QUERY_WAIT_S)
        awaited = {one for one, node in pending.items() if self._until[node] > now}
        longest = max((self._until[pending[one]] for one in awaited), default=now)
        with _without_expected_faults():
            replies = [*receive(grid, awaited, longest - now), *receive(grid, pending.keys() - awaited, 0.0)]
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        old = {one for one in pending if now - (self._asked[one][1] - QUERY_OPEN_S) > QUERY_WAIT_S}
        if not self._gathering:
            self._tell_silent([pending[one] for one in (awaited | old) - answered])
        return replies

    def _tell_silent(self, nodes: Collection[int]) -> None:
        """Log, once for each node, that it has not told its partition and that nobody waits for it any longer."""
        if new := sorted(set(nodes) - self._silent):
            self._silent.update(new)
            log(
                WARNING, "fedcross: no word from node %s on its partition after %.0f s; left out until it answers",
                self._named(new), QUERY_WAIT_S,
            )  # fmt: skip

    def _missing(self, grid: Grid) -> str:
        """Return a sentence on the nodes that do not answer, and one on those that are gone, where there are any."""
        online, known = set(grid.get_node_ids()), self._partition_of.keys()
        silent, gone = sorted(online - known), sorted(known - online)
        told = f" Connected, but without an answer: node {self._named(silent)}." if silent else ""
        return told + (f" Not connected any more: node {self._named(gone)}." if gone else "")

    def _named(self, nodes: list[int]) -> str:
        """Return the ids of `nodes` as a list for a person, with key and partition where they are known."""

        def one(node: int) -> str:
            key, bound = self.keys.get(node), self._bound.get(node)
            partition = self._partition_of.get(node) if bound is None else bound
            facts = [f"{what} {it}" for what, it in (("key", key), ("partition", partition)) if it is not None]
            return f"{node} ({', '.join(facts)})" if facts else str(node)

        more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
        return ", ".join(map(one, nodes[:MOST_NAMED])) + more

    def _note_width(self, node: int, width: object) -> None:
        """Note the width of a device; a node that says nothing, or nonsense, has none."""
        if isinstance(width, int | float) and not isinstance(width, bool) and 0 < width <= 1:
            self._widths[node] = float(width)
        else:
            self._widths.pop(node, None)

    def _tell_foreign(self, count: int, *, numbered: bool) -> None:
        """Log, in one line and once, that nodes do not tell their partitions."""
        if numbered in self._told:
            return
        self._told.add(numbered)
        what = "they are numbered by node id" if numbered else "they are left out: others tell it"
        log(
            INFO if numbered else WARNING,
            "fedcross: %d nodes do not tell their partition, %s. The ClientApp needs fedcross.tell_partition(app)",
            count, what,
        )  # fmt: skip


def simulated(grid: Grid) -> bool:
    """Return whether `grid` is that of Flower's simulation; its class is not imported, the SuperLink comes with it."""
    return any(kind.__name__ == "InMemoryGrid" for kind in type(grid).__mro__)


@contextmanager
def _without_expected_faults() -> Iterator[None]:
    """Drop the errors that Flower logs, in a simulation's own process, for nodes that cannot answer a query."""

    def unexpected(record: LogRecord) -> bool:
        text = record.getMessage() if record.levelno == ERROR else ""
        return not (EXPECTED_FAULT in text or text.startswith(EXPECTED_HEAD))

    FLOWER_LOGGER.addFilter(unexpected)
    try:
        yield
    finally:
        FLOWER_LOGGER.removeFilter(unexpected)
