"""What the parts of one run share: settings, filters, the log of replies, clients, the report of the round."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR, WARNING
from typing import Protocol

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError, FederationError, UploadError, one_line
from fedcross.strategies.filters.base import Filter
from fedcross.strategies.method import Round, Scalar, Upload
from fedcross.strategies.round.nodes import Nodes
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.round.slot import Events
from fedcross.strategies.wire.records import LOST, Payload, Request

#: The type of a client's error, and its words, of which so many characters are kept.
CLIENT_ERROR, LONGEST = re.compile(r"client_error: (?:code \d+: )?(\w+): (.*)", re.DOTALL), 300


class ReplyLog(Protocol):
    """Stores the uploads accepted since the last checkpoint: see :class:`server.reply_log.WriteAheadLog`."""

    # fmt: off
    def drawn(self, number: int) -> dict[int, float] | None: ...
    def draw(self, number: int, budgets: Mapping[int, float]) -> None: ...
    def accepted(self, current: Round) -> list[Upload]: ...
    def accept(self, current: Round, upload: Upload) -> None: ...
    def is_over(self, current: Round) -> bool: ...
    def end(self, current: Round, at: float | None = None) -> None: ...
    def order(self) -> list[tuple[int, int, float | None]]: ...
    def pulling(self, node: int | None) -> None: ...
    def killers(self) -> list[int]: ...
    # fmt: on


@dataclass
class ClientRecords:
    """Client -> number of its last accepted visit, client -> requests made, nodes left out for the rest of the run."""

    accepted: dict[int, int] = field(default_factory=dict)
    requests: dict[int, int] = field(default_factory=dict)
    excluded: list[int] = field(default_factory=list)


@dataclass
class RoundReport:
    """Costs and metrics of one global round; they become one line of ``metrics.jsonl``."""

    round: int
    clients: int = 0
    dropped: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    clipped: int = 0
    lightened: int = 0
    spares: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    exchanges: int = 0
    train_loss: float | None = None
    seconds_training: float = 0.0
    seconds_aggregation: float = 0.0
    #: Width -> accepted replies, of the widths that went out; only where models have several.
    width_replies: Counter[str] = field(default_factory=Counter)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Ledger:
    """What the exchanges of a run share; `nodes` are the connected clients, `packed` says how messages are encoded."""

    settings: RoundSettings
    filters: Sequence[Filter] = ()  # between method and wire
    log: ReplyLog | None = None  # of accepted replies, until a checkpoint covers them
    budgets: Mapping[int, float] = field(default_factory=dict)  # client -> width of its device, as configured
    widths: bool = False  # whether models have widths
    base: str = ""  # digest of the part of the model that is neither trained nor sent
    events: Events | None = None  # for those who watch
    durable: dict[int, int] | None = None  # client -> visit whose state it keeps; None: the last accepted one
    config: Mapping[str, Scalar] = field(default_factory=dict)  # scalars of every request
    clients: ClientRecords = field(default_factory=ClientRecords)
    report: RoundReport = field(default_factory=lambda: RoundReport(0))  # of the current round
    heard: bool = False  # whether a client has trained since this process began
    faults: dict[int, tuple[str, str]] = field(default_factory=dict)  # client -> type and words of its error now
    _refusals: set[tuple[int, int, str]] = field(default_factory=set)  # client, round and words of ConfigErrors

    def __post_init__(self) -> None:
        self.nodes, self.packed = Nodes(self), self.settings.packs

    def reject(self, client: int | None, error: UploadError, counts: Counter[str]) -> None:
        """Count a rejected reply in `counts`, log it, and keep an error that its client reports."""
        who = "unknown sender" if client is None else f"client {client}"
        if error.reason == LOST:
            log(WARNING, "fedcross: request to %s %s", who, error)
        else:
            counts[error.reason] += 1
            log(WARNING, "fedcross: reply of %s rejected, %s", who, error)
        if client is not None and (found := CLIENT_ERROR.match(str(error))):
            self.faults[client] = found[1], one_line(found[2])[:LONGEST]

    def exclude(self, node: int) -> None:
        """Leave `node` out for the rest of the run: its replies take all memory."""
        if node not in self.clients.excluded:
            log(ERROR, "fedcross: a reply of node %s took all memory, or the server died twice as it came. It is left "
                "out for the rest of the run.", node)  # fmt: skip
            self.clients.excluded.append(node)
            self.report.rejected["too_large"] += 1
        self.nodes.exclude(node)

    def end_if_common(self, asked: Collection[int], number: int, connected: int, *, answered: bool) -> None:
        """End the run if all clients that were asked failed alike, so that no later round could do better.

        A ConfigError: all refuse the configuration with the same words. A FederationError: all are local, raised an
        exception of one type, and nobody has trained yet. One client's word is not enough where a round asks one
        only, nor that of a few once others have trained.
        """
        faults, self.faults = self.faults, {}
        self.heard = self.heard or answered
        if answered or not faults or not set(asked) <= faults.keys():
            return
        kind, words = next(iter(faults.values()))
        local = self.settings.nonce and not self.settings.networked
        if local and not self.heard and kind != "ConfigError" and {one for one, _ in faults.values()} == {kind}:
            raise FederationError(
                f"All {len(faults)} clients of round {number} failed alike: {kind}: {words}. The traceback of the "
                "first one is above."
            )
        if set(faults.values()) != {("ConfigError", words)}:
            return
        self._refusals |= {(client, number, words) for client in faults}
        common = not self.heard or 2 * len(faults) > connected
        if common and sum(one == words for *_, one in self._refusals) >= 2:
            raise ConfigError(f"All {len(asked)} clients of round {number} refuse: {words} (their devices' words)")

    def logged(self, replies: ReplyLog, place: Round, payloads: Sequence[Payload]) -> dict[int, Upload]:
        """Return slot -> logged upload of the exchange at `place` that answers `payloads`; count the requests."""
        found, sent = {}, {payload.task.slot: payload for payload in payloads}
        for upload in replies.accepted(place):
            self.clients.requests[upload.client] = self.clients.requests.get(upload.client, 0) + 1
            payload = sent.get(upload.slot)
            if payload is not None and _answers(upload, payload):
                upload.task, found[upload.slot] = payload.task, upload
            else:
                log(WARNING, "fedcross: round %s: the logged reply of client %s for slot %s does not fit what the slot "
                    "sends now, and is not used", place.number, upload.client, upload.slot)  # fmt: skip
        return found

    def pull(self, replies_log: ReplyLog, grid: Grid, waiting: Mapping[str, Request]) -> Iterator[list[Message]]:
        """Yield replies to these requests, pulled one by one: a node whose reply takes all memory, or during whose
        replies the server died twice, is left out for the rest of the run.
        """
        for message_id, request in waiting.items():
            replies_log.pulling(request.node)
            try:
                replies = list(grid.pull_messages([message_id]))
            except MemoryError:
                self.exclude(request.node)
                continue
            finally:  # the note stays only where the process died
                replies_log.pulling(None)
            if replies:
                yield replies


def _answers(upload: Upload, payload: Payload) -> bool:
    """Return whether a logged upload answers what its slot sends now."""
    sent, got = ({name: array.shape for name, array in one.arrays.items()} for one in (payload, upload))
    asked = {group: {n: tuple(shape) for n, (shape, _) in s.items()} for group, s in payload.task.returns.items()}
    extras = {group: {name: array.shape for name, array in arrays.items()} for group, arrays in upload.extras.items()}
    return sent == got and asked == extras and (upload.client == payload.task.client or not payload.task.fixed)
