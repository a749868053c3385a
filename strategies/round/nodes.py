"""Which node holds which partition.

Flower's node ids are random, so clients are drawn and ordered by partition id. The server asks every node once for its
partition, with a ``query`` message. A node that is silent is left out until it answers; once the first round has begun,
the server waits for a node's answer at most once.

A node's answer is a claim. A key that was registered for a partition holds that one and no other; once such a key has
been seen, keys that were registered for none are refused. Without such keys, the first node keeps a partition as long
as it is connected. Further claims are refused, logged and counted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from logging import ERROR, INFO, WARNING, LogRecord

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid

from fedcross.core.errors import FederationError
from fedcross.core.registration import bound_partition, fingerprint
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.polling import LocalClients, receive

#: Seconds that one refresh waits for answers, and after which a node that has not answered is asked again.
QUERY_WAIT_S, QUERY_OPEN_S = 30.0, 300.0
#: Seconds between two lines that say that the server waits for clients, and between two looks.
SAID_S, LOOK_S = 60.0, 0.5
#: Most nodes that one line of the log names.
MOST_NAMED = 5
#: Flower's error code for an exception in the ClientApp. Other codes are lost nodes and crashes: those are asked again.
NO_ANSWER_TO_QUERIES = 2
#: What Flower's simulation logs, with two tracebacks, for a node whose ClientApp has no handler for queries.
EXPECTED_FAULTS = ("No query function registered", "An exception was raised when processing a message by")


class Nodes:
    """The nodes that are connected now.

    Attributes
    ----------
    online : dict of int to int
        Partition id -> node id, in the order of the partition ids; as of the last :meth:`refresh`.
    keys : dict of int to str
        Node id -> fingerprint of its registered key, where the SuperLink tells it.
    excluded : set of int
        Nodes that are left out for the rest of the run: a reply of theirs killed the server.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.online: dict[int, int] = {}
        self.keys: dict[int, str] = {}
        self.excluded: set[int] = set()
        self._widths: dict[int, float] = {}  # node -> width of its device, where it told one
        self._bound: dict[int, int | None] = {}  # node -> the partition that its key was registered for
        self._registered: dict[int, str] = {}  # node -> when its key was registered
        self._refused: set[tuple[int, int]] = set()  # claims that were refused before: node, partition
        self._partition_of: dict[int, int] = {}
        self._last: list[int] | None = None  # connected nodes at the last refresh; None unless all were known
        self._said: set[object] = set()  # what was logged of nodes that do not tell their partition
        self._asked: dict[str, tuple[int, float]] = {}  # open queries: message id -> node, when it was asked
        self._gathering = True  # until enough clients were there for a first round
        self._until: dict[int, float] = {}  # node -> until when a refresh waits for its answer

    def width(self, partition: int) -> float | None:
        """Return the width that the partition's holder has told of its device; None if it told none."""
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
            return list(self.online)
        online = set(ids) - self.excluded
        if new := sorted(online - self._partition_of.keys()):
            self._look_up(grid)
            self._partition_of.update(self._ask(grid, new))
        self._last = ids if online <= self._partition_of.keys() else None
        self.online = self._holders(online)
        return list(self.online)

    def exclude(self, node: int) -> None:
        """Leave a node out for the rest of the run."""
        self.excluded.add(node)
        self._last = None
        self.online = {partition: one for partition, one in self.online.items() if one != node}

    def _look_up(self, grid: Grid) -> None:
        """Learn which partitions keys were registered for, and when."""
        for node in grid.get_nodes() if hasattr(grid, "get_nodes") else ():
            self._bound[node.node_id] = bound_partition(node.name)
            self._registered[node.node_id] = node.registered_at
            if key := bytes(getattr(node, "public_key", b"")):
                self.keys[node.node_id] = fingerprint(key)

    def _holders(self, online: Collection[int]) -> dict[int, int]:
        """Return partition -> the node that holds it, in the order of the partitions; refuse all other claims."""
        claims: dict[int, list[int]] = {}
        binding = any(bound is not None for bound in self._bound.values())
        for node, partition in self._partition_of.items():  # in the order of their answers
            if node not in online:
                continue
            if binding and (bound := self._bound.get(node)) != partition:
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
        if (node, partition) not in self._refused:
            self._refused.add((node, partition))
            log(WARNING, "fedcross: node %s claims partition %s, refused: %s", node, partition, why)
            self._ledger.report.rejected["partition_taken"] += 1

    def wait_for(
        self, grid: Grid, count: int, wait_s: float, wanted: Collection[int] = (), *, endless: bool = False
    ) -> list[int]:
        """Refresh until `count` partitions and all `wanted` ones are online, or `wait_s` seconds have passed.

        An `endless` wait says once a minute that it goes on. The rest of `wanted` and of `count` are given `wait_s`
        seconds in any case.

        Raises
        ------
        FederationError
            If fewer than `count` are online after `wait_s` seconds; at once in a simulation that has fewer nodes.
        """
        began = time.monotonic()
        said = began - SAID_S
        while True:
            partitions = self.refresh(grid)
            waited = time.monotonic() - began
            enough = len(partitions) >= count
            if enough and (waited >= wait_s or set(wanted) <= set(partitions)):
                self._gathering = False
                return partitions
            if not enough and simulated(grid) and len(list(grid.get_node_ids())) < count:
                raise FederationError(
                    f"{len(partitions)} clients are simulated, {count} are needed, and no more will come. "
                    f'Say how many: flwr run --federation-config "num-supernodes={count}".'
                )
            if not enough and waited >= wait_s and not endless:
                raise FederationError(
                    f"{len(partitions)} clients are connected after {wait_s:.0f} s, {count} are needed."
                    f"{self._missing(grid)} Start more clients, raise federation.wait_s or lower "
                    "federation.min_clients."
                )
            if not enough and time.monotonic() - said >= SAID_S:
                said = time.monotonic()
                facts = {"connected": len(partitions), "needed": count, "seconds": wait_s}
                self._ledger.say("waiting_for_clients", round=self._ledger.report.round, **facts)
                log(INFO, "fedcross: %d of %d clients are connected, waiting.%s", len(partitions), count,
                    self._missing(grid) if waited else "")  # fmt: skip
            time.sleep(LOOK_S)

    def _ask(self, grid: Grid, nodes: list[int]) -> dict[int, int]:
        """Return node id -> partition id; nodes that have not replied are left for the next refresh.

        A query stays open for :data:`QUERY_OPEN_S`, and each refresh looks for its reply. Nodes of another app, which
        reply with an exception because they do not know this query, are numbered in the order of their node ids.
        """
        found: dict[int, int] = {}
        foreign: list[int] = []
        now = time.monotonic()
        self._asked = {key: one for key, one in self._asked.items() if one[1] + QUERY_OPEN_S > now}
        waiting = {node for node, _ in self._asked.values()}
        asked = {
            node: Message(RecordDict({"config": ConfigRecord({})}), dst_node_id=node, message_type=MessageType.QUERY)
            for node in nodes
            if node not in waiting
        }
        for message_id, node in zip(grid.push_messages(asked.values()), asked):
            if message_id:  # else it could not be sent
                self._asked[message_id] = node, now
        for reply in self._answers(grid, now):
            node, _ = self._asked.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                if reply.error.code == NO_ANSWER_TO_QUERIES:
                    foreign.append(node)
                continue
            config = reply.content.config_records.get("config", ConfigRecord({}))
            partition = config.get("partition-id", -1)
            if isinstance(partition, int) and not isinstance(partition, bool) and partition >= 0:
                found[node] = partition
                width = config.get("device-width")
                if isinstance(width, int | float) and not isinstance(width, bool) and 0 < width <= 1:
                    self._widths[node] = float(width)
        if foreign:
            self._say_foreign(len(foreign), numbered=not found)
        if foreign and not found:
            first = 1 + max(self._partition_of.values(), default=-1)
            return {node: first + index for index, node in enumerate(sorted(foreign))}
        return found

    def _answers(self, grid: Grid, now: float) -> list[Message]:
        """Return the answers to the open queries; after the start, wait for each node at most once."""
        for node, _ in self._asked.values():
            if self._gathering:  # nothing can begin without them
                self._until[node] = now + QUERY_WAIT_S
            self._until.setdefault(node, now if self._bound.get(node) is not None else now + QUERY_WAIT_S)
        awaited = {one for one, (node, _) in self._asked.items() if self._until[node] > now}
        longest = max((self._until[self._asked[one][0]] for one in awaited), default=now)
        with _without_expected_faults():
            late = self._asked.keys() - awaited
            replies = [*receive(grid, awaited, longest - now), *receive(grid, late, 0.0)]
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        silent = [
            node for one, (node, since) in self._asked.items()
            if one not in answered and (one in awaited or now - since > QUERY_WAIT_S)
        ]  # fmt: skip
        if new := [node for node in sorted(silent) if node not in self._said]:
            self._said.update(new)
            log(
                WARNING, "fedcross: no word from node %s on its partition after %.0f s; left out until it answers",
                self._named(new), QUERY_WAIT_S,
            )  # fmt: skip
        return replies

    def _missing(self, grid: Grid) -> str:
        """Return a sentence on the nodes that do not answer, and one on those that are gone, where there are any."""
        online, known = set(grid.get_node_ids()), self._partition_of.keys()
        silent, gone = sorted(online - known), sorted(known - online)
        told = f" Connected, but without an answer: node {self._named(silent)}." if silent else ""
        return told + (f" Not connected any more: node {self._named(gone)}." if gone else "")

    def _named(self, nodes: list[int]) -> str:
        """Return the ids of `nodes` as a list for a person, with key and partition where they are known."""

        def one(node: int) -> str:
            bound = self._bound.get(node)
            partition = self._partition_of.get(node) if bound is None else bound
            facts = [
                f"{what} {it}"
                for what, it in (("key", self.keys.get(node)), ("partition", partition))
                if it is not None
            ]
            return f"{node} ({', '.join(facts)})" if facts else str(node)

        more = f" and {len(nodes) - MOST_NAMED} more" if len(nodes) > MOST_NAMED else ""
        return ", ".join(map(one, nodes[:MOST_NAMED])) + more

    def _say_foreign(self, count: int, *, numbered: bool) -> None:
        """Log, in one line and once, that nodes do not tell their partitions."""
        if (what := "they are numbered by node id" if numbered else "they are left out: others tell it") in self._said:
            return
        self._said.add(what)
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
        return not any(fault in text for fault in EXPECTED_FAULTS)

    FLOWER_LOGGER.addFilter(unexpected)
    try:
        yield
    finally:
        FLOWER_LOGGER.removeFilter(unexpected)
