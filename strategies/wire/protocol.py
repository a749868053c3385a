"""The messages of a round: a request, its reply, and the check that the reply is exactly what was asked for.

Server to client: the model (``arrays``), named groups of further arrays (``extra.NAME``) and scalars (``config``).
Client to server: the same three and ``metrics``. A random nonce links each reply to the one request that it answers.
"""

from __future__ import annotations

import hmac
import math
import secrets
import sysconfig
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.records import Arrays, Spec, decode, digest, encode, nbytes_of, spec_of

if TYPE_CHECKING:  # a device's light process imports this module without torch
    from fedcross.strategies.method import Scalar, Task, Upload

EXTRA = "extra."
#: Name of the record, and of its array, with the scales of coded arrays (:mod:`strategies.filters.compression`).
SCALES = "scales"
#: Scalars of a request that its reply returns, so that it belongs to this request and no other.
ORIGIN = ("run", "round", "exchange", "client", "slot", "nonce")
#: Reason of a request without a reply: the SuperLink says that there is none, or none has come.
LOST = "lost"
#: Node id of the SuperLink, the sender when Flower reports that a node is gone; in one process, of every reply.
SUPERLINK_NODE_ID = 1
#: Flower's error codes for a request or reply that it cannot deliver; with these it says that there is no reply.
LOST_ON_THE_WAY = frozenset({ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE})
UNDELIVERED = LOST_ON_THE_WAY | {ErrorCode.NODE_UNAVAILABLE}
#: Largest number of examples, absolute value of a metric, and number of metrics that a reply may have.
MAX_EXAMPLES, LARGEST_METRIC, MAX_METRICS = 2**40, 1e9, 64
#: Most characters of an error's text that are kept: its beginning and its end.
SHOWN = 600


@dataclass(frozen=True)
class Payload:
    """A task in the form in which it is sent, after the filters.

    `arrays` and `scales` are the model as sent, coded perhaps (:mod:`strategies.filters.compression`); `received` is
    the model that the client decodes and trains. `model` and `model_scales` are what the reply's must be.
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
    def nbytes(self) -> int:
        """Bytes of all array values in this payload."""
        return sum(a.nbytes for group in (self.arrays, self.scales, *self.task.extras.values()) for a in group.values())

    @property
    def reply_nbytes(self) -> int:
        """Bytes of all array values in a reply to it."""
        return sum(nbytes_of(spec) for spec in (self.model, self.model_scales, *self.task.returns.values()))


@dataclass(eq=False)
class Request:
    """A request without its message, which holds a copied model.

    `origin` are the scalars that its reply must return; `sent` is the digest of its arrays, "" if nobody asks for it;
    `made` is in seconds of ``time.monotonic``. `repeatable`: neither a repetition nor repeated.
    """

    payload: Payload
    node: int
    origin: Mapping[str, str | int]
    down: int
    sent: str = ""
    repeatable: bool = True
    answered: bool = False
    made: float = field(default_factory=time.monotonic)


def request(
    payload: Payload, node: int, config: Mapping[str, Scalar], ttl_s: float, *, packed: bool = False, sent: str = ""
) -> tuple[Message, Request]:
    """Return the Flower message that carries `payload`, with digest `sent`, to `node`; and what is known of it.

    `config` are all scalars, also the task's; ``run``, ``round`` and ``exchange`` are among them.
    """
    content = RecordDict({"arrays": encode(payload.arrays, packed)})
    for name, arrays in payload.task.extras.items():
        content[EXTRA + name] = encode(arrays, packed)
    if payload.scales:
        content[SCALES] = encode(payload.scales, packed)
    task = payload.task
    values: dict[str, Any] = {**config, "client": task.client, "slot": task.slot, "nonce": secrets.token_hex(16)}
    content["config"], group = ConfigRecord(values), str(values["round"])
    message = Message(content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=ttl_s, group_id=group)
    return message, Request(payload, node, {name: values[name] for name in ORIGIN}, payload.nbytes, sent)


def digest_of(content: Payload | Upload) -> str:
    """Return the SHA-256 of all arrays of a payload or upload, with their groups, names, shapes and dtypes."""
    extras = content.task.extras if isinstance(content, Payload) else content.extras
    groups = {"arrays": content.arrays, **{EXTRA + name: arrays for name, arrays in extras.items()}}
    return digest({**groups, SCALES: content.scales} if content.scales else groups)


# ---- replies ------------------------------------------------------------------------------------------------------


def answer(
    asked_for: RecordDict,
    arrays: Arrays,
    extras: Mapping[str, Arrays],
    num_examples: int,
    metrics: Mapping[str, float],
    scales: Arrays | None = None,
) -> RecordDict:
    """Return the content of the client's answer to a message with content `asked_for`, packed if that is."""
    asked, model = asked_for.config_records["config"], asked_for.array_records["arrays"]
    content = RecordDict({"arrays": encode(arrays, model)})
    groups = {EXTRA + name: group for name, group in extras.items()} | ({SCALES: scales} if scales else {})
    for name, group in groups.items():
        content[name] = encode(group, model)
    content["config"] = ConfigRecord({name: asked[name] for name in ORIGIN})
    content["metrics"] = MetricRecord({"num-examples": num_examples, **metrics})
    return content


def failure(asked_for: RecordDict, error: BaseException) -> RecordDict:
    """Return the content of the client's answer that says why it could not do what a message asked for.

    It has the error's type, message, file and line. Flower's own error replies do not name their request.
    """
    asked = asked_for.config_records["config"]
    file, line = place_of(error)
    told: dict[str, Any] = {"error": type(error).__name__, "detail": str(error)[:4000], "file": file, "line": line}
    return RecordDict({"config": ConfigRecord({name: asked[name] for name in ORIGIN} | told)})


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


def check(message: Message, asked: Request, *, nonce: bool = True) -> dict[str, Any]:
    """Return what an upload takes from a reply, or raise an error with the reason why it is rejected.

    Nothing that a client sends is trusted: every field is compared with the request, and arrays with the declared
    model before memory is allocated for them. Without `nonce`, as for plain Flower clients, the reply need not return
    the request's scalars.

    Raises
    ------
    UploadError
        With reason ``lost`` (the SuperLink has no reply), ``client_error``, ``malformed_message``, ``wrong_round``,
        ``wrong_slot``, ``wrong_nonce``, ``bad_examples``, ``bad_metrics`` or one of
        :func:`strategies.wire.records.decode`.
    """
    if message.has_error():
        gone = message.error.code in UNDELIVERED and message.metadata.src_node_id == SUPERLINK_NODE_ID
        said = f"code {message.error.code}: {_shown(message.error.reason)}"
        raise UploadError(LOST if gone else "client_error", said)
    if not message.has_content():
        raise UploadError("malformed_message", "a reply without content")
    content, payload = message.content, asked.payload
    if nonce:
        _check_origin(message, asked)
    specs = {"arrays": payload.model, **{EXTRA + name: spec for name, spec in payload.task.returns.items()}}
    specs |= {SCALES: payload.model_scales} if payload.model_scales else {}
    if wrong := (set(content) - {"config"}) ^ {"metrics", *specs}:
        raise UploadError("malformed_message", f"record {str(min(map(str, wrong)))[:80]!r} missing or not asked for")
    if "metrics" not in content.metric_records or not specs.keys() <= content.array_records.keys():
        raise UploadError("malformed_message", "a record of another kind")
    examples, metrics = check_metrics(content.metric_records["metrics"])
    found = {name: decode(content.array_records[name], spec) for name, spec in specs.items()}
    nbytes = sum(array.nbytes for arrays in found.values() for array in arrays.values())
    upload = {"arrays": found.pop("arrays"), "scales": found.pop(SCALES, {}), "nbytes": nbytes}
    upload["extras"] = {name.removeprefix(EXTRA): group for name, group in found.items()}
    return upload | {"num_examples": examples, "metrics": metrics}


def proves(message: Message, asked: Request) -> bool:
    """Return whether the reply returns its request's nonce, which only the server and the asked client know."""
    if not message.has_content() or "config" not in message.content.config_records:
        return False
    nonce = message.content.config_records["config"].get("nonce")
    return isinstance(nonce, str) and hmac.compare_digest(nonce.encode(), str(asked.origin["nonce"]).encode())


def _check_origin(message: Message, asked: Request) -> None:
    """Check that the reply answers exactly this request, and is no report of a client's error."""
    if "config" not in message.content.config_records:
        raise UploadError("malformed_message", "config is missing or a record of another kind")
    config = message.content.config_records["config"]
    if not proves(message, asked):
        raise UploadError("wrong_nonce", "the reply belongs to another request")
    if wrong := [name for name in ORIGIN if config.get(name) != asked.origin[name]]:
        reason = "wrong_slot" if wrong[0] in ("client", "slot") else "wrong_round"
        found = str(config.get(wrong[0]))[:20]
        raise UploadError(reason, f"{wrong[0]} {found} instead of {asked.origin[wrong[0]]}")
    if set(message.content) == {"config"} and "error" in config:
        place = f" ({_shown(config['file'])}:{_shown(config.get('line'))})" if config.get("file") else ""
        where = "" if config["error"] == "ConfigError" else place
        raise UploadError("client_error", f"{_shown(config['error'])}: {_shown(config.get('detail'))}{where}")


def _shown(text: object) -> str:
    whole = str(text)
    return whole if len(whole) <= SHOWN else f"{whole[: SHOWN // 2]} ... {whole[-SHOWN // 2 :]}"


def check_metrics(record: MetricRecord) -> tuple[int, dict[str, float]]:
    """Return the number of examples and the other metrics, all finite and at most ``LARGEST_METRIC``.

    They are averaged over clients, so one without bounds would decide the mean.
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
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or abs(value) > LARGEST_METRIC or (name == "local-accuracy" and not 0 <= value <= 1):  # type: ignore[arg-type, operator]
            raise UploadError("bad_metrics", f"{str(name)[:40]}={str(value)[:40]} is no number that it can have")
        metrics[str(name)] = float(value)  # type: ignore[arg-type]
    return examples, metrics
