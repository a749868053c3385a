"""The content of a round's messages as plain data, and its form as Flower messages.

Server to client: the model (``arrays``), named groups of further arrays (``extra.NAME``) and scalars (``config``).
Client to server: the same three and ``metrics``. A random nonce links each reply to the one request that it answers.
"""

from __future__ import annotations

import secrets
import sysconfig
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict

from fedcross.core import allowance
from fedcross.core.allowance import Allowance
from fedcross.strategies.arrays import Arrays, Spec, nbytes_of, spec_of
from fedcross.strategies.wire.records import encode, encode_like

if TYPE_CHECKING:  # a device's light process imports this module without torch
    from fedcross.strategies.method import Round, Scalar, Task

EXTRA = "extra."
#: Name of the record, and of its array, with the scales of coded arrays (:mod:`strategies.wire.compression`).
SCALES = "scales"
#: Scalars of a request that its reply returns, so that it belongs to this request and no other.
ORIGIN = ("run", "round", "exchange", "client", "slot", "nonce")
#: Most bytes of an array's header as it is sent, without its name; the headers of packed arrays are shorter.
HEADER = 1024


@dataclass(frozen=True)
class Payload:
    """A task in the form in which it is sent, after the filters.

    Attributes
    ----------
    task : Task
        What the method sends.
    arrays, scales : Arrays
        The model as sent, coded perhaps, and its scales (:mod:`strategies.filters.compression`).
    received : Arrays
        The model that the client decodes and trains.
    model, model_scales : Spec
        What the reply's model and its scales must be.
    """

    task: Task
    arrays: Arrays
    received: Arrays
    model: Spec
    scales: Arrays = field(default_factory=dict)
    model_scales: Spec = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task) -> Payload:
        """Return the payload of an uncoded task; the reply's model has the shapes of the one that is sent."""
        return cls(task, task.arrays, task.arrays, spec_of(task.arrays))

    @property
    def extras(self) -> Mapping[str, Arrays]:
        """The task's groups of further arrays."""
        return self.task.extras

    @property
    def nbytes(self) -> int:
        """Bytes of all array values in this payload."""
        return sum(a.nbytes for group in (self.arrays, self.scales, *self.task.extras.values()) for a in group.values())

    @property
    def reply_nbytes(self) -> int:
        """Bytes of all array values in a reply to it."""
        return sum(nbytes_of(spec) for spec in (self.model, self.model_scales, *self.task.returns.values()))


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
    config: Mapping[str, Scalar],
    ttl_s: float,
    packed: bool = False,
    sent: str = "",
) -> tuple[Message, Ticket]:
    """Return the Flower message that carries `payload`, with digest `sent`, to `node`; and the ticket for its reply.

    `config` are all scalars, also the task's; those that link the reply to the request are added.
    """
    task = payload.task
    content = RecordDict({"arrays": encode(payload.arrays, packed)})
    for name, arrays in task.extras.items():
        content[EXTRA + name] = encode(arrays, packed)
    if payload.scales:
        content[SCALES] = encode(payload.scales, packed)
    expected = Expected(
        run,
        current.number,
        current.exchange,
        task.client,
        task.slot,
        secrets.token_hex(16),
        payload.model,
        dict(task.returns),
        payload.model_scales,
    )
    origin = {name: getattr(expected, name) for name in ORIGIN}
    content["config"] = ConfigRecord({**config, **origin})
    message = Message(
        content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=ttl_s, group_id=str(current.number)
    )
    return message, Ticket(node, expected, payload.nbytes, sent)


def reply(
    message: Message, arrays: Arrays, extras: Mapping[str, Arrays], num_examples: int, metrics: Mapping[str, float]
) -> Message:
    """Return the client's answer to `message`."""
    return Message(answer(message.content, arrays, extras, num_examples, metrics), reply_to=message)


def failure(asked_for: RecordDict, error: BaseException) -> RecordDict:
    """Return the content of the client's answer that says why it could not do what a message asked for.

    It has the error's type, message, file and line. Flower's own error replies do not name their request.
    """
    asked = asked_for.config_records["config"]
    origin = {name: asked[name] for name in ORIGIN}
    file, line = place_of(error)
    told: dict[str, str | int] = {
        "error": type(error).__name__,
        "detail": str(error)[:4000],
        "file": file,
        "line": line,
    }
    return RecordDict({"config": ConfigRecord({**origin, **told})})


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
