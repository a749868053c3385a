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
from typing import TYPE_CHECKING, Any, TypeVar

from flwr.app import ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.records import Arrays, Spec, decode, encode, nbytes_of, spec_of
from fedcross.strategies.wire.records import digest as digest_of_groups

if TYPE_CHECKING:  # a device's light process imports this module without torch
    from fedcross.strategies.method import Scalar, Task, Upload

#: Arrays, or their specification.
G = TypeVar("G", Arrays, Spec)
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
    """A task in the form in which it is sent, after the filters."""

    task: Task
    arrays: Arrays  # the model as sent, coded perhaps (strategies.filters.compression)
    received: Arrays  # the model that the client decodes and trains
    model: Spec  # what the reply's must be
    scales: Arrays = field(default_factory=dict)  # of the coded arrays
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
    """A request without its message, which holds a copied model."""

    payload: Payload
    node: int
    origin: Mapping[str, str | int]  # the scalars that its reply must return
    down: int
    digest: str = ""  # of its arrays, if anybody asks for it
    repeatable: bool = True  # neither a repetition nor repeated
    answered: bool = False
    made: float = field(default_factory=time.monotonic)


def request(
    payload: Payload, node: int, config: Mapping[str, Scalar], ttl_s: float, *, packed: bool = False, digest: str = ""
) -> tuple[Message, Request]:
    """Return the Flower message that carries `payload`, with this digest, to `node`; and what is known of it.

    `config` are all scalars, also the task's; ``run``, ``round`` and ``exchange`` are among them.
    """
    task = payload.task
    groups = groups_of(payload.arrays, task.extras, payload.scales)
    content = RecordDict({name: encode(group, packed) for name, group in groups.items()})
    values: dict[str, Any] = {**config, "client": task.client, "slot": task.slot, "nonce": secrets.token_hex(16)}
    content["config"], group = ConfigRecord(values), str(values["round"])
    message = Message(content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=ttl_s, group_id=group)
    return message, Request(payload, node, {name: values[name] for name in ORIGIN}, payload.nbytes, digest)


def digest_of(content: Payload | Upload) -> str:
    """Return the SHA-256 of all arrays of a payload or upload, with their groups, names, shapes and dtypes."""
    extras = content.task.extras if isinstance(content, Payload) else content.extras
    return digest_of_groups(groups_of(content.arrays, extras, content.scales))


def groups_of(model: G, extras: Mapping[str, G], scales: G | None) -> dict[str, G]:
    """Return what a message holds of each: record name -> arrays, or their specification."""
    found = {"arrays": model, **{EXTRA + name: group for name, group in extras.items()}}
    return {**found, SCALES: scales} if scales else found


# ---- replies ------------------------------------------------------------------------------------------------------


def answer(
    asked_for: RecordDict, arrays: Arrays, extras: Mapping[str, Arrays], num_examples: int,
    metrics: Mapping[str, float], scales: Arrays | None = None,
) -> RecordDict:  # fmt: skip
    """Return the content of the client's answer to a message with content `asked_for`, packed if that is."""
    asked, model = asked_for.config_records["config"], asked_for.array_records["arrays"]
    groups = groups_of(arrays, extras, scales)
    content = RecordDict({name: encode(group, model) for name, group in groups.items()})
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
    the request's scalars. Reasons of an UploadError: ``lost`` (the SuperLink has no reply), ``client_error``,
    ``malformed_message``, ``wrong_round``, ``wrong_slot``, ``wrong_nonce``, ``bad_examples``, ``bad_metrics``, and
    those of :func:`strategies.wire.records.decode`.
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
    specs = groups_of(payload.model, payload.task.returns, payload.model_scales)
    if wrong := (set(content) - {"config"}) ^ {"metrics", *specs}:
        raise UploadError("malformed_message", f"record {str(min(map(str, wrong)))[:80]!r} missing or not asked for")
    if "metrics" not in content.metric_records or not specs.keys() <= content.array_records.keys():
        raise UploadError("malformed_message", "a record of another kind")
    examples, metrics = check_metrics(content.metric_records["metrics"])
    found = {name: decode(content.array_records[name], spec) for name, spec in specs.items()}
    nbytes = sum(array.nbytes for arrays in found.values() for array in arrays.values())
    facts = {"num_examples": examples, "metrics": metrics, "nbytes": nbytes}
    upload = {"arrays": found.pop("arrays"), "scales": found.pop(SCALES, {}), **facts}
    return upload | {"extras": {name.removeprefix(EXTRA): group for name, group in found.items()}}


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
    examples, metrics = record.get("num-examples"), dict[str, float]()
    if type(examples) is not int or not 0 < examples <= MAX_EXAMPLES:
        raise UploadError("bad_examples", f"num-examples {str(examples)[:40]}, expected an integer from 1")
    for name, value in record.items():
        number = float(value) if type(value) in (int, float) else math.nan  # type: ignore[arg-type]
        least, most = (0.0, 1.0) if name == "local-accuracy" else (-LARGEST_METRIC, LARGEST_METRIC)
        if name != "num-examples":
            if not least <= number <= most:
                raise UploadError("bad_metrics", f"{str(name)[:40]}={str(value)[:40]} is no number that it can have")
            metrics[str(name)] = number
    return examples, metrics
