"""Which node holds which partition.

Flower's node ids are random, so clients are drawn and ordered by partition id. The server asks every node once for its
partition, with a ``query`` message, and waits for the answer at most once; a silent node is left out until it answers.

A node's answer is a claim. A key that was registered for a partition holds that one and no other; once such a key has
been seen, keys that were registered for none are refused. Without such keys, the first node keeps a partition as long
as it is connected. Further claims are refused, logged and counted.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from logging import ERROR, INFO, WARNING, LogRecord
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.common.logger import FLOWER_LOGGER, log
from flwr.serverapp import Grid

from fedcross.core.errors import FederationError
from fedcross.core.settings import bound_partition, fingerprint

if TYPE_CHECKING:
    from fedcross.strategies.round.ledger import Ledger

#: Least and largest pause between two polls in seconds, and the share of the time since the last reply that it takes.
PAUSE_S, LONGEST_S, SHARE = 0.002, 2.0, 0.05
#: Seconds that one refresh waits for answers, and after which a node that has not answered is asked again.
QUERY_WAIT_S, QUERY_OPEN_S = 30.0, 60.0
#: Seconds between two lines that say that the server waits for clients, and between two looks.
SAID_S, LOOK_S = 60.0, 0.5
#: Flower's error code for an exception in the ClientApp. Other codes are lost nodes and crashes: those are asked again.
NO_ANSWER_TO_QUERIES = 2
#: What Flower's simulation logs, with two tracebacks, for a node whose ClientApp has no handler for queries.
EXPECTED_FAULTS = ("No query function registered", "An exception was raised when processing a message by")


@runtime_checkable
class LocalClients(Protocol):
    """Attributes of a grid whose clients run on this machine: whether ``pull_messages`` itself runs them, and node id
    -> partition id. Flower's own grids do not have them.
    """

    blocking: bool
    partitions: dict[int, int]


class Nodes:
    """The nodes that are connected now; `ledger` has the widths of devices and counts refused claims.

    `online` is partition id -> node id, by partition, as of the last :meth:`refresh`; `keys` is node id -> fingerprint
    of its registered key, where the SuperLink tells it; `excluded` are nodes of which a reply killed the server.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.online: dict[int, int] = {}
        self.keys: dict[int, str] = {}
        self.excluded: set[int] = set()
        self._widths: dict[int, float] = {}  # node -> width of its device, where it told one
        self._registered: dict[int, tuple[int | None, str]] = {}  # node -> partition of its key, and since when
        self._partition_of: dict[int, int] = {}
        self._last: list[int] | None = None  # connected nodes at the last refresh; None unless all were known
        self._asked: dict[str, tuple[int, float]] = {}  # open queries: message id -> node, when it was asked
        self._awaited: set[int] = set()  # nodes for whose answer a refresh has waited
        self._mixed = False  # whether a node has told its partition beside some that do not
        self._said: set[object] = set()  # what was logged once

    def budget(self, partition: int) -> float:
        """Return the width of a partition's device: what its node has told, else the configuration, else 1."""
        told = self._widths.get(self.online.get(partition, -1))
        return self._ledger.budgets.get(partition, 1.0) if told is None else told

    def refresh(self, grid: Grid) -> list[int]:
        """Get the connected nodes from the grid, ask new ones for their partition, return the sorted partition ids."""
        if isinstance(grid, LocalClients):
            return list(self.local(grid))
        ids = list(grid.get_node_ids())
        if ids == self._last:  # same nodes as last time, all known: fast even with 10,000 clients
            return list(self.online)
        online = set(ids) - self.excluded
        if new := sorted(online - self._partition_of.keys()):
            for node in grid.get_nodes() if hasattr(grid, "get_nodes") else ():
                self._registered[node.node_id] = bound_partition(node.name), node.registered_at
                if key := bytes(getattr(node, "public_key", b"")):
                    self.keys[node.node_id] = fingerprint(key)
            self._partition_of.update(self._ask(grid, new))
        self._last = ids if online <= self._partition_of.keys() else None
        self.online = self._holders(online)
        return list(self.online)

    def local(self, grid: LocalClients, count: int = 0) -> dict[int, int]:
        """Return the clients of this machine, all of which are always there, as ``online``; `count` are needed."""
        found = {partition: node for node, partition in grid.partitions.items() if node not in self.excluded}
        self.online = dict(sorted(found.items()))
        if len(found) < count:
            raise FederationError(f"{len(found)} clients are simulated, {count} are needed. Lower clients_per_round.")
        return self.online

    def exclude(self, node: int) -> None:
        """Leave a node out for the rest of the run."""
        self.excluded.add(node)
        self._last = None
        self.online = {partition: one for partition, one in self.online.items() if one != node}

    def wait_for(
        self, grid: Grid, count: int, wait_s: float, wanted: Collection[int] = (), *, endless: bool = False
    ) -> list[int]:
        """Refresh until `count` partitions and all `wanted` ones are online, or `wait_s` seconds have passed.

        An `endless` wait for `count` says once a minute that it goes on. Else a FederationError says that fewer are
        online after `wait_s` seconds, at once in a simulation that has fewer nodes.
        """
        began = time.monotonic()
        said = began - SAID_S
        while True:
            partitions = self.refresh(grid)
            found, now = len(partitions), time.monotonic()
            if found >= count and (now - began >= wait_s or set(wanted) <= set(partitions)):
                return partitions
            if found < count and simulated(grid) and len(list(grid.get_node_ids())) < count:
                raise FederationError(
                    f"{found} clients are simulated, {count} are needed, and no more will come. "
                    f'Say how many: flwr run --federation-config "num-supernodes={count}".'
                )
            if found < count and now - began >= wait_s and not endless:
                raise FederationError(
                    f"{found} clients are connected after {wait_s:.0f} s, {count} are needed.{self._missing(grid)} "
                    "Start more clients, raise federation.wait_s or lower federation.min_clients."
                )
            if found < count and now - said >= SAID_S:
                said = now
                facts = {"round": self._ledger.report.round, "connected": found, "needed": count, "seconds": wait_s}
                if self._ledger.events:
                    self._ledger.events.tell("waiting_for_clients", facts)
                missing = self._missing(grid) if now > began else ""
                log(INFO, "fedcross: %d of %d clients are connected, waiting.%s", found, count, missing)
            time.sleep(LOOK_S)

    # ---- partitions -----------------------------------------------------------------------------------------------

    def _holders(self, online: Collection[int]) -> dict[int, int]:
        """Return partition -> the node that holds it, in the order of the partitions; refuse all other claims."""
        claims: dict[int, list[int]] = {}
        binding = any(bound is not None for bound, _ in self._registered.values())
        for node, partition in self._partition_of.items():  # in the order of their answers
            bound = self._registered.get(node, (None, ""))[0]
            if node in online and binding and bound != partition:
                self._refuse(node, partition, f"its key is registered for partition {bound}")
            elif node in online:
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
        since = self._registered.get(node, (None, ""))[1]
        return self.online.get(self._partition_of[node]) != node, not since, since

    def _refuse(self, node: int, partition: int, why: str) -> None:
        if self._once((node, partition)):
            log(WARNING, "fedcross: node %s claims partition %s, refused: %s", node, partition, why)
            self._ledger.report.rejected["partition_taken"] += 1

    def _ask(self, grid: Grid, nodes: list[int]) -> dict[int, int]:
        """Return node id -> partition id; nodes that have not replied are left for the next refresh.

        A query stays open for :data:`QUERY_OPEN_S`, and each refresh looks for its reply. Nodes of another app, which
        reply with an exception because they do not know this query, are numbered in the order of their node ids.
        """
        now, kind = time.monotonic(), MessageType.QUERY
        self._asked = {key: one for key, one in self._asked.items() if one[1] + QUERY_OPEN_S > now}
        new = [node for node in nodes if node not in {asked for asked, _ in self._asked.values()}]
        contents = [RecordDict({"config": ConfigRecord({})}) for _ in new]
        sent = grid.push_messages([Message(c, dst_node_id=node, message_type=kind) for c, node in zip(contents, new)])
        self._asked |= {one: (node, now) for one, node in zip(sent, new) if one}
        found: dict[int, int] = {}
        foreign: list[int] = []
        for reply in self._answers(grid):
            node, _ = self._asked.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                foreign += [node] if reply.error.code == NO_ANSWER_TO_QUERIES else []
                continue
            config = reply.content.config_records.get("config", ConfigRecord({}))
            partition, width = config.get("partition-id"), config.get("device-width")
            if isinstance(partition, int) and not isinstance(partition, bool) and partition >= 0:
                found[node] = partition
                if isinstance(width, int | float) and not isinstance(width, bool) and 0 < width <= 1:
                    self._widths[node] = float(width)
        self._mixed = self._mixed or bool(found and foreign)
        what = "left out: others tell it" if self._mixed else "numbered by node id"
        if foreign and self._once(what):
            log(WARNING if self._mixed else INFO, "fedcross: %d nodes do not tell their partition, they are %s. "
                "The ClientApp needs fedcross.tell_partition(app)", len(foreign), what)  # fmt: skip
        first = 1 + max(self._partition_of.values(), default=-1)
        return found if self._mixed else found | {node: first + i for i, node in enumerate(sorted(foreign))}

    def _answers(self, grid: Grid) -> list[Message]:
        """Return the answers to the open queries, having waited for each node at most once."""
        awaited = {one for one, (node, _) in self._asked.items() if node not in self._awaited}
        self._awaited.update(node for node, _ in self._asked.values())
        with _without_expected_faults():
            late = self._asked.keys() - awaited
            replies = [*receive(grid, awaited, QUERY_WAIT_S), *receive(grid, late, 0.0)]
        answered = {reply.metadata.reply_to_message_id for reply in replies}
        silent = sorted(self._asked[one][0] for one in awaited - answered)
        if new := [node for node in silent if self._once(node)]:
            log(WARNING, "fedcross: no word from node %s on its partition after %.0f s; left out until it answers",
                self._named(new), QUERY_WAIT_S)  # fmt: skip
        return replies

    # ---- words ----------------------------------------------------------------------------------------------------

    def _once(self, what: object) -> bool:
        """Return whether this is the first time that `what` is said."""
        first = what not in self._said
        self._said.add(what)
        return first

    def _missing(self, grid: Grid) -> str:
        """Return a sentence on the nodes that do not answer, and one on those that are gone, where there are any."""
        online, known = set(grid.get_node_ids()), self._partition_of.keys()
        silent, gone = (
            (" Connected, but without an answer", online - known),
            (" Not connected any more", known - online),
        )
        return "".join(f"{words}: node {self._named(sorted(nodes))}." for words, nodes in (silent, gone) if nodes)

    def _named(self, nodes: list[int]) -> str:
        """Return at most five ids of `nodes`, with their keys where they are known."""
        told = [f"{node} (key {self.keys[node]})" if node in self.keys else str(node) for node in nodes[:5]]
        return ", ".join(told) + (f" and {len(nodes) - 5} more" if len(nodes) > 5 else "")


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


# ---- awaiting replies -------------------------------------------------------------------------------------------


def pause(last: float, deadline: float) -> None:
    """Sleep between two polls, the longer the longer ago the `last` reply came; not beyond the deadline."""
    now = time.monotonic()
    time.sleep(max(min(LONGEST_S, max(PAUSE_S, SHARE * (now - last)), deadline - now), 0.0))


def forget(grid: Grid, message_ids: Iterable[str]) -> None:
    """Let a grid on this machine drop those of these requests that have no reply; Flower's own grids cannot."""
    if drop := getattr(grid, "forget", None):
        drop(message_ids)


def receive(grid: Grid, message_ids: Iterable[str], timeout_s: float) -> Iterator[Message]:
    """Yield replies to `message_ids` as they arrive, until all have arrived or `timeout_s` seconds have passed."""
    waiting, last = {one for one in message_ids if one}, time.monotonic()
    deadline = last + timeout_s
    while waiting:
        replies = list(grid.pull_messages(set(waiting)))
        for reply in replies:
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        if (now := time.monotonic()) >= deadline or not waiting:
            return
        last = now if replies else last
        if not getattr(grid, "blocking", False):
            pause(last, deadline)
