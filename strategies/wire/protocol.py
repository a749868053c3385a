"""The content of a round's messages as plain data, and its form as Flower messages.

Server to client: the model (``arrays``), named groups of further arrays (``extra.NAME``) and scalars (``config``).
Client to server: the same three and ``metrics``. A random nonce links each reply to the one request that it answers.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedcross.core import allowance
from fedcross.core.allowance import Allowance
from fedcross.strategies.wire.records import Arrays, Spec, encode, encode_like, nbytes_of

Scalar = int | float | str | bool
EXTRA = "extra."
#: Name of the record, and of its array, with the scales of coded arrays (:mod:`strategies.wire.compression`).
SCALES = "scales"
#: The stream of the global model, for methods that also send models of their slots.
GLOBAL = "global"
#: Scalars of a request that its reply returns, so that it belongs to this request and no other.
ORIGIN = ("run", "round", "exchange", "client", "slot", "nonce")
#: Most bytes of an array's header as it is sent, without its name; the headers of packed arrays are shorter.
HEADER = 1024


@dataclass(frozen=True)
class Round:
    """One exchange of messages with the sampled clients.

    Attributes
    ----------
    number : int
        The global round, from 1.
    exchange : int
        The exchange within the round, from 0; most methods have one.
    clients : tuple of int
        The sampled partition ids, in the order of the draw.
    seed : int
        The run's seed.
    """

    number: int
    exchange: int
    clients: tuple[int, ...]
    seed: int


@dataclass
class Payload:
    """The data sent to one client: model, extras, scalars. `slot` is the method's index (a row of the pool, say).

    `stream` says of which model this is the next state, for the error feedback of :mod:`strategies.wire.compression`: a
    name without a dot, ``GLOBAL`` for the global model; "" for the slot's own.
    """

    client: int
    slot: int
    arrays: Arrays
    extras: Mapping[str, Arrays] = field(default_factory=dict)
    config: Mapping[str, Scalar] = field(default_factory=dict)
    scales: Arrays = field(default_factory=dict)
    stream: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all array values in this payload."""
        return sum(a.nbytes for group in (self.arrays, self.scales, *self.extras.values()) for a in group.values())


@dataclass(frozen=True)
class Trace:
    """Where an accepted upload came from, for the audit trail: node, digests, seconds on the way, bytes sent to it."""

    node: int
    sent: str
    received: str
    seconds: float
    down: int


@dataclass
class Upload:
    """A reply that the guard accepted from one client. Arrays are read-only views into the message."""

    client: int
    slot: int
    arrays: Arrays
    extras: Mapping[str, Arrays]
    num_examples: int
    metrics: Mapping[str, float]
    nbytes: int = 0
    scales: Arrays = field(default_factory=dict)
    trace: Trace | None = None


@dataclass(frozen=True)
class Expected:
    """The values that the reply to one request must have to be accepted."""

    run: str
    round: int
    exchange: int
    client: int
    slot: int
    nonce: str
    model: Spec
    extras: Mapping[str, Spec]
    scales: Spec = field(default_factory=dict)
    #: The records of arrays that the reply must have: name -> what is in it.
    groups: Mapping[str, Spec] = field(init=False)

    def __post_init__(self) -> None:
        groups = {"arrays": self.model, **{EXTRA + name: spec for name, spec in self.extras.items()}}
        object.__setattr__(self, "groups", {**groups, SCALES: self.scales} if self.scales else groups)

    @property
    def allowance(self) -> Allowance:
        """What the reply may consist of, before anything in it is known."""
        arrays = {name: allowance.Arrays(max(len(spec), 1), _most_bytes(spec)) for name, spec in self.groups.items()}
        return Allowance(arrays, frozenset({"config", "metrics"}))


def _most_bytes(spec: Spec) -> int:
    """Return the most bytes that arrays of `spec` have as they are sent, packed or not."""
    return nbytes_of(spec) + sum(HEADER + len(name.encode()) for name in spec) + HEADER


@dataclass(frozen=True)
class Ticket:
    """An open request: the node that it went to, and the values that its reply must have.

    `sent` is the digest of what was sent, "" if nobody asks for it; `made` is in seconds of ``time.monotonic``.
    """

    node: int
    expected: Expected
    down: int
    sent: str = ""
    made: float = field(default_factory=time.monotonic)


def request(
    payload: Payload,
    current: Round,
    run: str,
    node: int,
    model: Spec,
    extras: Mapping[str, Spec],
    ttl_s: float,
    scales: Spec | None = None,
    packed: bool = False,
    sent: str = "",
) -> tuple[Message, Ticket]:
    """Return the Flower message that carries `payload`, with digest `sent`, to `node`; and the ticket for its reply."""
    nonce = secrets.token_hex(16)
    content = RecordDict({"arrays": encode(payload.arrays, packed)})
    for name, arrays in payload.extras.items():
        content[EXTRA + name] = encode(arrays, packed)
    if payload.scales:
        content[SCALES] = encode(payload.scales, packed)
    content["config"] = ConfigRecord(
        {
            **payload.config,
            "run": run,
            "round": current.number,
            "exchange": current.exchange,
            "client": payload.client,
            "slot": payload.slot,
            "nonce": nonce,
        }
    )
    message = Message(
        content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=ttl_s, group_id=str(current.number)
    )
    expected = Expected(
        run, current.number, current.exchange, payload.client, payload.slot, nonce, model, dict(extras), scales or {}
    )
    return message, Ticket(node, expected, payload.nbytes, sent)


def reply(
    message: Message, arrays: Arrays, extras: Mapping[str, Arrays], num_examples: int, metrics: Mapping[str, float]
) -> Message:
    """Return the client's answer to `message`."""
    return Message(answer(message.content, arrays, extras, num_examples, metrics), reply_to=message)


def failure(asked_for: RecordDict, error: BaseException) -> RecordDict:
    """Return the content of the client's answer that says why it could not do what a message asked for.

    Flower's own error replies do not say to which request they belong, so anybody's word would do.
    """
    asked = asked_for.config_records["config"]
    origin = {name: asked[name] for name in ORIGIN}
    return RecordDict({"config": ConfigRecord({**origin, "error": type(error).__name__, "detail": str(error)[:4000]})})


def answer(
    asked_for: RecordDict,
    arrays: Arrays,
    extras: Mapping[str, Arrays],
    num_examples: int,
    metrics: Mapping[str, float],
    scales: Arrays | None = None,
) -> RecordDict:
    """Return the content of the client's answer to a message with content `asked_for`, packed if that is."""
    asked = asked_for.config_records["config"]
    model = asked_for.array_records["arrays"]
    content = RecordDict({"arrays": encode_like(model, arrays)})
    for name, group in extras.items():
        content[EXTRA + name] = encode_like(model, group)
    if scales:
        content[SCALES] = encode_like(model, scales)
    content["config"] = ConfigRecord({name: asked[name] for name in ORIGIN})
    content["metrics"] = MetricRecord({"num-examples": num_examples, **metrics})
    return content
