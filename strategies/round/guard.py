"""The guard: it alone accepts or rejects replies, before any other code uses them.

It trusts nothing that a client sends: it checks every field against the ticket of the request that the reply claims to
answer, and arrays against the declared model before it allocates any memory for them.
"""

from __future__ import annotations

import hmac
import math
from collections.abc import Callable, Mapping

from flwr.app import Message, MetricRecord
from flwr.common.constant import ErrorCode

from fedcross.core.allowance import Refusal
from fedcross.core.errors import UploadError
from fedcross.strategies.round.trail import LOST, Trail
from fedcross.strategies.wire.protocol import EXTRA, SCALES, Expected, Ticket, Upload
from fedcross.strategies.wire.records import decode

#: Largest number of examples that the guard accepts from one client.
MAX_EXAMPLES = 2**40
#: Largest absolute value of a metric, such as a loss, that the guard accepts.
LARGEST_METRIC = 1e9
#: Largest number of metrics that the guard accepts in one reply.
MAX_METRICS = 64
#: Node id of the SuperLink, the sender when Flower reports that a node is gone; in one process, of every reply.
SUPERLINK_NODE_ID = 1
#: Errors by which the SuperLink says that there is no reply: nobody has rejected one, the request is lost.
UNDELIVERED = frozenset(
    {ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE}
)
#: Reasons for which the server still waits: the reply came from another node or answers another request.
FOREIGN = frozenset({"wrong_node", "wrong_nonce"})
#: Most characters of an error's text that are kept: its beginning, which says what is wrong, and its end.
SHOWN = 600


class Inbox:
    """The open requests of one exchange, and the uploads accepted so far.

    Parameters
    ----------
    nonce : bool
        Whether replies must echo their request's nonce (:func:`check`).
    on_rejected : callable
        Called with the client (None if unknown) and the error of every rejected reply.
    on_accepted : callable, optional
        Called with each upload that has won its slot, before the upload counts.
    decode : callable, optional
        Decompresses a checked upload (:mod:`strategies.wire.compression`); may raise ``UploadError``.
    trail : Trail, optional
        Notes how every request ended.
    """

    def __init__(
        self,
        nonce: bool,
        on_rejected: Callable[[int | None, UploadError], None],
        on_accepted: Callable[[Upload], None] | None = None,
        decode: Callable[[Upload], Upload] | None = None,
        trail: Trail | None = None,
    ) -> None:
        self.trail = trail
        self._nonce = nonce
        self._on_rejected = on_rejected
        self._on_accepted = on_accepted
        self._decode = decode
        #: Message id -> ticket, of all requests, and which of them have been answered.
        self.tickets: dict[str, Ticket] = {}
        self.answered: set[str] = set()
        #: Whether every request has exactly one reply, valid or not, as in simulation within one process.
        self.single = False
        #: Message id -> slot, of the requests whose reply may still win.
        self.waiting: dict[str, int] = {}
        #: Requests whose rejected reply anybody could have sent (an error of Flower, say). Their slots count as lost,
        #: but a true reply that comes while the exchange lasts still wins.
        self.doubtful: set[str] = set()
        self.won: dict[int, Upload] = {}

    def expect(self, tickets: Mapping[str, Ticket]) -> None:
        """Expect a reply to each of these requests: message id -> ticket."""
        self.tickets.update(tickets)
        if self.trail is not None:
            self.trail.asked(tickets)
        self.waiting.update({message_id: ticket.expected.slot for message_id, ticket in tickets.items()})

    def knows(self, message_id: str) -> bool:
        """Return whether a request was sent under this id."""
        return message_id in self.tickets

    def open_clients(self) -> set[tuple[int, int]]:
        """Return slot and client of each request whose reply may still win."""
        return {(slot, self.tickets[message_id].expected.client) for message_id, slot in self.waiting.items()}

    def settle(self, reply: Message) -> int | None:
        """Accept or reject `reply`; return its slot if the slot is now lost (not won, no open request), else None."""
        asked, sender = reply.metadata.reply_to_message_id, reply.metadata.src_node_id
        ticket = self.tickets.get(asked)
        try:
            if ticket is None:
                raise UploadError("unknown", "not an open request")
            slot = ticket.expected.slot
            if sender not in {ticket.node, SUPERLINK_NODE_ID}:
                raise UploadError("wrong_node", f"node {sender} answers for node {ticket.node}")
            if asked in self.answered:
                raise UploadError("duplicate", "answered already")
            if slot in self.won:
                raise UploadError("superseded", f"client {self.won[slot].client} was faster with slot {slot}")
            upload = check(reply, ticket.expected, nonce=self._nonce)
            if self.trail is not None:
                self.trail.trace(ticket, upload)
            if self._decode is not None:
                upload = self._decode(upload)
        except UploadError as error:
            if self.trail is not None:
                self.trail.rejected(asked, ticket, reply, error, final=self.single or error.reason not in FOREIGN)
            self._on_rejected(ticket.expected.client if ticket else None, error)
            if ticket is None:
                return None
            self._doubt(reply, ticket)
            if error.reason in FOREIGN and not self.single:
                return None
            self.waiting.pop(asked, None)
            return self._orphan(ticket.expected.slot)
        self.answered.add(asked)
        if self.trail is not None:
            self.trail.accepted(asked, ticket, upload)
        self.take(upload)
        if self._on_accepted is not None:
            self._on_accepted(upload)
        return None

    def _doubt(self, reply: Message, ticket: Ticket) -> None:
        """Note whether the client itself sent this rejected reply; if not, its true one may still come."""
        asked, slot = reply.metadata.reply_to_message_id, ticket.expected.slot
        if self.single or not self._nonce or slot in self.won or proves(reply, ticket.expected):
            self.doubtful.discard(asked)
        elif reply.metadata.src_node_id != SUPERLINK_NODE_ID:  # the SuperLink lets no node send in its name
            self.doubtful.add(asked)

    def give_up(self, message_id: str) -> int | None:
        """Stop waiting for the reply to `message_id`; return its slot if no other request for the slot is open."""
        return self._orphan(self.waiting.pop(message_id))

    def take(self, upload: Upload) -> None:
        """Record that `upload` won its slot, and stop waiting for other replies for it."""
        self.won[upload.slot] = upload
        for message_id in [one for one, slot in self.waiting.items() if slot == upload.slot]:
            del self.waiting[message_id]

    def _orphan(self, slot: int) -> int | None:
        return None if slot in self.won or slot in self.waiting.values() else slot

    @property
    def uploads(self) -> list[Upload]:
        """The accepted uploads by slot."""
        return [self.won[slot] for slot in sorted(self.won)]


def check(message: Message, expected: Expected, *, nonce: bool = True) -> Upload:
    """Return the upload in `message`, or raise an error with the reason why it is rejected.

    Parameters
    ----------
    message : Message
        A reply as it came from the grid.
    expected : Expected
        What the request asked for.
    nonce : bool
        Whether the reply must return the request's run, round, slot and nonce. Plain Flower clients do not; only
        Flower's own reply id links their replies to a request.

    Raises
    ------
    UploadError
        With reason ``lost`` (the SuperLink has no reply), ``client_error``, ``malformed_message``, ``wrong_round``,
        ``wrong_slot``, ``wrong_nonce``, ``bad_examples``, ``bad_metrics`` or one of
        :func:`strategies.wire.records.decode`.
    """
    if message.has_error():
        if isinstance(message.error, Refusal):
            raise UploadError(message.error.kind, str(message.error.reason))
        gone = message.error.code in UNDELIVERED and message.metadata.src_node_id == SUPERLINK_NODE_ID
        said = f"code {message.error.code}: {shown(message.error.reason)}"
        raise UploadError(LOST if gone else "client_error", said)
    if not message.has_content():
        raise UploadError("malformed_message", "a reply without content")
    content = message.content
    if nonce and set(content) == {"config"}:
        _check_origin(message, expected)
        config = content.config_records["config"]
        if "error" in config:
            raise UploadError("client_error", f"{shown(config['error'])}: {shown(config.get('detail'))}")
    groups = expected.groups
    records = {"metrics", *groups} | ({"config"} if nonce else set())
    if (set(content) if nonce else set(content) - {"config"}) != records:
        raise UploadError("malformed_message", f"records {sorted(map(str, content))[:8]} instead of {sorted(records)}")
    if "metrics" not in content.metric_records:
        raise UploadError("malformed_message", "metrics is a record of another kind")
    if nonce:
        _check_origin(message, expected)
    num_examples, metrics = check_metrics(content.metric_records["metrics"])
    decoded = {}
    for name, spec in groups.items():
        if name not in content.array_records:
            raise UploadError("malformed_message", f"{name} is a record of another kind")
        decoded[name] = decode(content.array_records[name], spec)
    received = sum(array.nbytes for arrays in decoded.values() for array in arrays.values())
    return Upload(
        client=expected.client,
        slot=expected.slot,
        arrays=decoded.pop("arrays"),
        scales=decoded.pop(SCALES, {}),
        extras={name.removeprefix(EXTRA): arrays for name, arrays in decoded.items()},
        num_examples=num_examples,
        metrics=metrics,
        nbytes=received,
    )


def shown(text: object) -> str:
    """Return `text`, without its middle if it is long."""
    whole = str(text)
    return whole if len(whole) <= SHOWN else f"{whole[: SHOWN // 2]} ... {whole[-SHOWN // 2 :]}"


def proves(message: Message, expected: Expected) -> bool:
    """Return whether the reply returns its request's nonce, which only the server and the asked client know."""
    if not message.has_content() or "config" not in message.content.config_records:
        return False
    nonce = message.content.config_records["config"].get("nonce")
    return isinstance(nonce, str) and hmac.compare_digest(nonce.encode(), expected.nonce.encode())


def _check_origin(message: Message, expected: Expected) -> None:
    """Check that the reply answers exactly this request."""
    if "config" not in message.content.config_records:
        raise UploadError("malformed_message", "config is a record of another kind")
    config = message.content.config_records["config"]
    if not proves(message, expected):
        raise UploadError("wrong_nonce", "the reply belongs to another request")
    if config.get("run") != expected.run or (config.get("round"), config.get("exchange")) != (
        expected.round,
        expected.exchange,
    ):
        raise UploadError("wrong_round", f"round {str(config.get('round'))[:20]} instead of {expected.round}")
    if (config.get("client"), config.get("slot")) != (expected.client, expected.slot):
        found = f"slot {str(config.get('slot'))[:20]} of client {str(config.get('client'))[:20]}"
        raise UploadError("wrong_slot", f"{found} instead of slot {expected.slot} of client {expected.client}")


def check_metrics(record: MetricRecord) -> tuple[int, dict[str, float]]:
    """Return the number of examples and the other metrics, all finite and at most ``LARGEST_METRIC``.

    They are averaged over clients, so one without bounds would say anything in the others' name.
    """
    if len(record) > MAX_METRICS:
        raise UploadError("bad_metrics", f"{len(record)} metrics, {MAX_METRICS} at most")
    examples = record.get("num-examples")
    if isinstance(examples, bool) or not isinstance(examples, int) or not 0 < examples <= MAX_EXAMPLES:
        raise UploadError("bad_examples", f"num-examples {str(examples)[:40]}, expected an integer from 1")
    metrics: dict[str, float] = {}
    for name, value in record.items():
        if name == "num-examples":
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise UploadError("bad_metrics", f"{str(name)[:40]}={str(value)[:40]} is not a finite number")
        if abs(value) > LARGEST_METRIC:
            raise UploadError("bad_metrics", f"{str(name)[:40]}={value:.4g}, at most {LARGEST_METRIC:g} to either side")
        if name == "local-accuracy" and not 0 <= value <= 1:
            raise UploadError("bad_metrics", f"local-accuracy={value:.4g}, expected 0 to 1")
        metrics[str(name)] = float(value)
    return examples, metrics
