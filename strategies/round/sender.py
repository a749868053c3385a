"""Makes the requests of a run and takes what comes back: what every exchange shares, of rounds and of visits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from typing import Any, Protocol

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.strategies.filters.base import Filter
from fedcross.strategies.method import Round, Scalar, Task, Upload
from fedcross.strategies.parts.widths import described, holds
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.nodes import Nodes
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.wire.protocol import Payload, Ticket, request


class ReplyLog(Protocol):
    """Stores the uploads accepted since the last checkpoint (:mod:`server.reply_log`)."""

    def available(self, number: int) -> list[int] | None:
        """Return the partitions that round `number` was drawn from before a crash; None if it was not drawn yet."""

    def widths(self, number: int) -> dict[int, float] | None:
        """Return the widths that devices had told when round `number` was drawn; None if they were not stored."""

    def draw(self, number: int, available: Sequence[int], widths: Mapping[int, float] | None = None) -> None:
        """Store the partitions that round `number` is drawn from, and the devices' widths if it depends on them."""

    def accepted(self, current: Round) -> list[Upload]:
        """Return the uploads that this exchange had accepted before the server crashed."""

    def accept(self, current: Round, upload: Upload) -> None:
        """Store `upload`; it is on disk when this method returns."""

    def is_over(self, current: Round) -> bool:
        """Return whether the exchange had ended before the server crashed; slots without an upload are then lost."""

    def end(self, current: Round, at: float | None = None) -> None:
        """Store that the exchange has ended, and when, in seconds of the run's clock, if it has one."""

    def order(self) -> list[tuple[int, int, float | None]]:
        """Return round, exchange and time of each upload and end, in the order in which they were stored."""

    def pulling(self, node: int | None) -> None:
        """Note which node's reply is pulled next; None: none is. It survives the death of this process."""

    def killers(self) -> list[int]:
        """Return the nodes during whose reply an earlier process died."""


@dataclass
class ClientRecords:
    """What the server knows of the clients: client -> number of its last accepted visit, client -> requests sent.

    ``excluded`` are nodes that are left out for the rest of the run.
    """

    accepted: dict[int, int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    excluded: list[int] = field(default_factory=list)


class Sender:
    """Makes the requests of a run, and decodes and stores what comes back.

    Parameters
    ----------
    settings : RoundSettings
        Of the run.
    ledger : Ledger
        Counts and logs.
    filters : sequence of Filter
        Between method and wire.
    per_round : int
        Visits of one client that one round has at most; clients number their states by it.
    log : ReplyLog, optional
        Keeps accepted replies until a checkpoint covers them.
    budgets : mapping of int to float
        Client -> width of its device, where the configuration says it.
    base : str
        Digest of the part of the model that is neither trained nor sent; "" without one.
    sized : bool
        Whether models have several widths.
    """

    def __init__(
        self,
        settings: RoundSettings,
        ledger: Ledger,
        filters: Sequence[Filter] = (),
        per_round: int = 1,
        log: ReplyLog | None = None,
        budgets: Mapping[int, float] | None = None,
        base: str = "",
        *,
        sized: bool = False,
    ) -> None:
        self.settings, self.ledger, self.filters, self.per_round = settings, ledger, filters, per_round
        self.log, self.budgets, self._base, self._sized = log, budgets or {}, base, sized
        self.nodes = Nodes(ledger)
        self.clients = ClientRecords()
        #: Client -> visit from which on it keeps its states; None: the last accepted one.
        self.durable: dict[int, int] | None = None
        self.config: Mapping[str, Scalar] = {}

    def visit(self, current: Round) -> int:
        """Return the number under which a client stores its state of this exchange; it grows with every exchange."""
        return (current.number - 1) * self.per_round + current.exchange + 1

    def budget(self, client: int) -> float:
        """Return the width of a client's device: what its node says, else the configuration, else 1."""
        told = self.nodes.width(client)
        return self.budgets.get(client, 1.0) if told is None else told

    def fits(self, payload: Payload, client: int) -> bool:
        """Return whether a client's device can hold the model of `payload`."""
        return not self._sized or holds(self.budget(client), payload.task.width)

    def payloads(self, current: Round, tasks: Sequence[Task]) -> list[Payload]:
        """Return what is sent for `tasks`, after the filters."""
        found = [Payload.of(task) for task in tasks]
        for one in self.filters:
            found = one.down(current, found)
        return found

    def request(self, current: Round, payload: Payload, seconds: float) -> tuple[Message, Ticket] | None:
        """Return the message for `payload`, whose client may take so many seconds; None if it cannot be asked."""
        task = payload.task
        if (node := self.nodes.online.get(task.client)) is None:
            return None
        if not self.fits(payload, task.client):
            log(
                WARNING, "fedcross: client %s is not asked for slot %s: its device is too small", task.client, task.slot
            )
            return None
        requests, accepted = self.clients.requests, self.clients.accepted
        requests[task.client] = requests.get(task.client, 0) + 1
        self.ledger.say("request", client=task.client)
        config = {
            **self.config,
            **task.config,
            **(described(task.width) if self._sized else {}),
            "server-round": current.number,
            "rounds": self.settings.rounds,
            "state": accepted.get(task.client, 0),
            "keep": (accepted if self.durable is None else self.durable).get(task.client, 0),
            "visit": self.visit(current),
            **({"base": self._base} if self._base else {}),
        }
        digest = self.ledger.digest(payload) if self.ledger.audits else ""
        return request(payload, current, self.settings.run, node, config, seconds, self.settings.packs, digest)

    def decode(self, payload: Payload, upload: Upload) -> Upload:
        """Return a checked upload decoded; raise an ``UploadError`` if it cannot be."""
        for one in reversed(self.filters):
            upload = one.up(payload, upload)
        return upload

    def before(self, place: Round, payloads: Sequence[Payload]) -> list[Upload]:
        """Return the logged uploads of the exchange at `place` that answer `payloads`; count the requests for all."""
        found, sent = [], {payload.task.slot: payload for payload in payloads}
        for upload in self.log.accepted(place) if self.log is not None else ():
            self.clients.requests[upload.client] = self.clients.requests.get(upload.client, 0) + 1
            payload = sent.get(upload.slot)
            if payload is None or (why := _mismatch(upload, payload)):
                what = "no model goes out in this slot now" if payload is None else why
                log(WARNING, "fedcross: round %s: the logged reply of client %s for slot %s is not used: %s",
                    place.number, upload.client, upload.slot, what)  # fmt: skip
            else:
                upload.task = payload.task
                found.append(upload)
        return found

    def pull(self, grid: Grid, waiting: Mapping[str, Ticket]) -> Iterator[list[Message]]:
        """Yield replies to these requests. With a log they are pulled one by one, and a node whose reply takes all
        memory, or took it before a restart, is left out for the rest of the run.
        """
        if self.log is None:
            yield list(grid.pull_messages(set(waiting)))
            return
        for message_id, ticket in waiting.items():
            self.log.pulling(ticket.node)
            try:
                replies = list(grid.pull_messages([message_id]))
            except MemoryError:
                self.exclude(ticket.node)
                continue
            finally:  # the note stays only where the process died
                self.log.pulling(None)
            if replies:
                yield replies

    def exclude(self, node: int) -> None:
        """Leave `node` out for the rest of the run: one of its replies took all memory."""
        if node not in self.clients.excluded:
            log(ERROR, "fedcross: a reply of node %s took all memory. It is left out for the rest of the run.", node)
            self.clients.excluded.append(node)
            self.ledger.report.rejected["too_large"] += 1
        self.nodes.exclude(node)


def _mismatch(upload: Upload, payload: Payload) -> str:
    """Return why a logged upload is no answer to what its slot sends now; empty if it is one."""
    if upload.client != payload.task.client and payload.task.fixed:
        return f"the slot's model goes to client {payload.task.client} now"
    model = {name: array.shape for name, array in payload.arrays.items()}
    expected: dict[str, Any] = {"": model}
    expected |= {
        group: {n: tuple(shape) for n, (shape, _) in spec.items()} for group, spec in payload.task.returns.items()
    }
    sent = {"": upload.arrays, **upload.extras}
    if {group: {name: array.shape for name, array in found.items()} for group, found in sent.items()} != expected:
        return "it has other shapes than the slot's model has now"
    return ""
