"""What the server knows of a run besides the method: settings, clients, the round's report, and who is told."""

# ruff: noqa: D102 - the methods of ReplyLog are documented where they are implemented
from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from logging import ERROR, INFO, WARNING
from typing import Any, Protocol

from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError, FederationError, UploadError, one_line
from fedcross.strategies.filters.base import Filter
from fedcross.strategies.method import Round, Scalar, Upload
from fedcross.strategies.round.nodes import Nodes
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.wire.protocol import LOST, Payload, Request
from fedcross.strategies.wire.records import spec_of

#: The type of a client's error, and its words, of which so many characters are kept.
CLIENT_ERROR, LONGEST = re.compile(r"client_error: (?:code \d+: )?(\w+): (.*)", re.DOTALL), 300
#: Receives the name of an event (:data:`core.events.EVENTS`, ``request``, ``request_ended``, ``uploads`` or
#: ``visit_ended``) and its fields.
Tell = Callable[[str, Mapping[str, Any]], None]


class ReplyLog(Protocol):
    """Stores the uploads accepted since the last checkpoint: see :class:`server.reply_log.WriteAheadLog`."""

    # fmt: off
    def available(self, number: int) -> list[int] | None: ...
    def widths(self, number: int) -> dict[int, float] | None: ...
    def draw(self, number: int, available: Sequence[int], widths: Mapping[int, float] | None = None) -> None: ...
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
    """Client -> number of its last accepted visit, client -> requests sent, nodes left out for the rest of the run."""

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


class Ledger:
    """What every exchange of a run shares.

    Attributes
    ----------
    settings, filters : RoundSettings, sequence of Filter
        Of the run; between method and wire.
    per_round : int
        Visits of one client that one round has at most; clients number their states by it.
    log : ReplyLog or None
        Keeps accepted replies until a checkpoint covers them.
    base, widths : str, bool
        Digest of the part of the model that is neither trained nor sent, "" without one; whether models have widths.
    tell, audits : callable or None, bool
        Who is told what happens, if anybody is; whether requests need digests.
    nodes, clients, report
        The connected clients, what is known of clients, the current round.
    durable, config : dict of int to int or None, mapping
        Client -> visit from which on it keeps its states (None: the last accepted one); scalars of every request.
    """

    def __init__(
        self,
        settings: RoundSettings,
        filters: Sequence[Filter] = (),
        per_round: int = 1,
        log: ReplyLog | None = None,
        budgets: Mapping[int, float] | None = None,
        base: str = "",
        *,
        widths: bool = False,
        tell: Tell | None = None,
        audits: bool = False,
    ) -> None:
        self.settings, self.filters, self.per_round, self.log = settings, filters, per_round, log
        self.base, self.widths, self.tell, self.audits = base, widths, tell, audits
        self.packed = settings.packs
        self.report, self.clients = RoundReport(0), ClientRecords()
        self.nodes = Nodes(self, budgets or {})
        self.durable: dict[int, int] | None = None
        self.config: Mapping[str, Scalar] = {}
        self.heard = False  # whether a client has trained since this process began
        self.faults: dict[int, tuple[str, str]] = {}  # client -> type and words of its error in this exchange
        self._said: set[tuple[int, int, str]] = set()  # client, round and words of earlier ones

    # ---- rejected replies -----------------------------------------------------------------------------------------

    def reject(self, client: int | None, error: UploadError, counts: Counter[str]) -> None:
        """Count a rejected reply in `counts`, keep what its client says of the configuration, and log it."""
        who = "unknown sender" if client is None else f"client {client}"
        if error.reason == LOST:
            log(WARNING, "fedcross: request to %s %s", who, error)
        else:
            counts[error.reason] += 1
            log(WARNING, "fedcross: reply of %s rejected, %s", who, error)
        if client is not None and (found := CLIENT_ERROR.match(str(error))):
            self.faults[client] = found[1], one_line(found[2])[:LONGEST]

    def end_if_common(self, asked: Collection[int], number: int, connected: int, *, answered: bool) -> None:
        """End the run if all clients that were asked failed alike, so that no later round could do better.

        One client's word is not enough where a round asks one only, nor that of a few once others have trained.

        Raises
        ------
        ConfigError
            If all refuse the configuration with the same words.
        FederationError
            If the clients are local ones, nobody has trained yet, and all raised an exception of one type.
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
        self._said |= {(client, number, words) for client in faults}
        if self.heard and 2 * len(faults) <= connected:
            return
        if sum(one == words for *_, one in self._said) >= 2:
            raise ConfigError(f"All {len(asked)} clients of round {number} refuse: {words} (their devices' words)")

    # ---- the log of replies ---------------------------------------------------------------------------------------

    def logged(self, place: Round, payloads: Sequence[Payload]) -> list[Upload]:
        """Return the logged uploads of the exchange at `place` that answer `payloads`; count the requests for all."""
        found, sent = [], {payload.task.slot: payload for payload in payloads}
        for upload in self.log.accepted(place) if self.log is not None else ():
            self.clients.requests[upload.client] = self.clients.requests.get(upload.client, 0) + 1
            payload = sent.get(upload.slot)
            if payload is None or not _answers(upload, payload):
                log(WARNING, "fedcross: round %s: the logged reply of client %s for slot %s does not fit what the slot "
                    "sends now, and is not used", place.number, upload.client, upload.slot)  # fmt: skip
            else:
                upload.task = payload.task
                found.append(upload)
        return found

    def pull(self, grid: Grid, waiting: Mapping[str, Request]) -> Iterator[list[Message]]:
        """Yield replies to these requests. With a log on a network they are pulled one by one, and a node whose reply
        takes all memory, or took it before a restart, is left out for the rest of the run.
        """
        if self.log is None or not self.settings.networked:
            yield list(grid.pull_messages(set(waiting)))
            return
        for message_id, request in waiting.items():
            self.log.pulling(request.node)
            try:
                replies = list(grid.pull_messages([message_id]))
            except MemoryError:
                self.exclude(request.node)
                continue
            finally:  # the note stays only where the process died
                self.log.pulling(None)
            if replies:
                yield replies

    def exclude(self, node: int) -> None:
        """Leave `node` out for the rest of the run: one of its replies took all memory."""
        if node not in self.clients.excluded:
            log(ERROR, "fedcross: a reply of node %s took all memory, or the server died as it came. It is left out "
                "for the rest of the run.", node)  # fmt: skip
            self.clients.excluded.append(node)
            self.report.rejected["too_large"] += 1
        self.nodes.exclude(node)

    def say_waiting(self, number: int, waiting: Mapping[str, Request], left_s: float) -> None:
        """Log which slots a round that takes long waits for."""
        found = sorted(f"{one.payload.task.slot} (client {one.payload.task.client})" for one in waiting.values())
        log(INFO, "fedcross: round %d waits for %d slots, %s, for %.0f s at most (federation.deadline_s)",
            number, len(found), ", ".join(found[:10]), left_s)  # fmt: skip


def _answers(upload: Upload, payload: Payload) -> bool:
    """Return whether a logged upload answers what its slot sends now."""
    shapes = {group: {n: shape for n, (shape, _) in spec_of(a).items()} for group, a in upload.extras.items()}
    wanted = {group: {n: tuple(shape) for n, (shape, _) in s.items()} for group, s in payload.task.returns.items()}
    model = {name: array.shape for name, array in upload.arrays.items()}
    same = upload.client == payload.task.client or not payload.task.fixed
    return same and shapes == wanted and model == {name: array.shape for name, array in payload.arrays.items()}
