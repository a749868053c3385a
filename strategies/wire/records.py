"""The messages of a round: a request, its reply, the check that the reply is what was asked for, arrays as records.

Server to client: the model (``arrays``), named groups of further arrays (``extra.NAME``) and scalars (``config``).
Client to server: the same three and ``metrics``. A random nonce links each reply to the one request that it answers.

An array is sent as its ``.npy`` bytes, Flower's own convention, so any Flower client reads and writes it: one copy to
encode, none to decode. Over a network all arrays of a record can travel as one (:mod:`strategies.wire.formats`).
"""

from __future__ import annotations

import functools
import hmac
import io
import math
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from flwr.app import Array as FlowerArray
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedcross.core.errors import UploadError
from fedcross.strategies.pool.pool import Array as Array
from fedcross.strategies.pool.pool import Arrays as Arrays
from fedcross.strategies.wire.formats import PACKED, STYPE, npy_header, pack, packable, unpack
from fedcross.strategies.wire.formats import Spec as Spec

if TYPE_CHECKING:  # a device's light process imports this module without torch
    from fedcross.strategies.method import Scalar, Task

#: Arrays, or their specification.
G = TypeVar("G", Arrays, Spec)
#: Prefix of the names of further groups of arrays; name of the record, and of its array, with the scales of coded
#: arrays (:mod:`strategies.filters.compression`); the serialisation type that other arrays declare to Flower.
EXTRA, SCALES, NUMPY = "extra.", "scales", "numpy.ndarray"
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


@dataclass(frozen=True)
class Payload:
    """A task in the form in which it is sent, after the filters."""

    task: Task
    arrays: Arrays  # the model as sent, coded perhaps (strategies.filters.compression)
    received: Arrays  # the model that the client decodes and trains
    scales: Arrays = field(default_factory=dict)  # of the coded arrays
    reply: Spec = field(default_factory=dict)  # the arrays that the reply codes
    reply_scales: Spec = field(default_factory=dict)

    @property
    def model(self) -> Spec:
        """What the reply's model must be."""
        return {**spec_of(self.received), **self.reply}

    @property
    def nbytes(self) -> int:
        """Bytes of all array values in this payload."""
        return sum(a.nbytes for group in (self.arrays, self.scales, *self.task.extras.values()) for a in group.values())

    @property
    def reply_nbytes(self) -> int:
        """Bytes of all array values in a reply to it."""
        specs = (self.model, self.reply_scales, *self.task.returns.values())
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for spec in specs for shape, dtype in spec.values())


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
    payload: Payload, node: int, config: Mapping[str, Scalar], ttl_s: float, *, packed: bool = False
) -> tuple[Message, Request]:
    """Return the Flower message that carries `payload` to `node`, and what is known of it.

    `config` are all scalars, also the task's; ``run``, ``round`` and ``exchange`` are among them.
    """
    task = payload.task
    groups = groups_of(payload.arrays, task.extras, payload.scales)
    content = RecordDict({name: encode(group, packed) for name, group in groups.items()})
    values: dict[str, Any] = {**config, "client": task.client, "slot": task.slot, "nonce": secrets.token_hex(16)}
    content["config"], group = ConfigRecord(values), str(values["round"])
    message = Message(content, dst_node_id=node, message_type=MessageType.TRAIN, ttl=ttl_s, group_id=group)
    return message, Request(payload, node, {name: values[name] for name in ORIGIN}, payload.nbytes)


def groups_of(model: G, extras: Mapping[str, G], scales: G | None) -> dict[str, G]:
    """Return what a message holds of each: record name -> arrays, or their specification."""
    found = {"arrays": model, **{EXTRA + name: group for name, group in extras.items()}}
    return {**found, SCALES: scales} if scales else found


def answer(
    asked_for: RecordDict, arrays: Arrays, extras: Mapping[str, Arrays], num_examples: int,
    metrics: Mapping[str, float], scales: Arrays | None = None,
) -> RecordDict:  # fmt: skip
    """Return the content of the client's answer to a message with content `asked_for`, packed if that is."""
    asked, packed = asked_for.config_records["config"], is_packed(asked_for.array_records["arrays"])
    groups = groups_of(arrays, extras, scales)
    content = RecordDict({name: encode(group, packed) for name, group in groups.items()})
    content["config"] = ConfigRecord({name: asked[name] for name in ORIGIN})
    content["metrics"] = MetricRecord({"num-examples": num_examples, **metrics})
    return content


def check(message: Message, asked: Request, *, nonce: bool = True) -> dict[str, Any]:
    """Return what an upload takes from a reply, or raise an UploadError with the reason why it is rejected.

    Nothing that a client sends is trusted: every field is compared with the request, and arrays with the declared
    model before memory is allocated for them. Without `nonce`, as for plain Flower clients, the reply need not return
    the request's scalars. Reasons: ``lost`` (the SuperLink has no reply), ``client_error``, ``malformed_message``,
    ``wrong_round``, ``wrong_slot``, ``wrong_nonce``, ``bad_examples``, ``bad_metrics``, and those of :func:`decode`.
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
    specs = groups_of(payload.model, payload.task.returns, payload.reply_scales)
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
    """Return beginning and end of an error's text, 600 characters of it."""
    whole = str(text)
    return whole if len(whole) <= 600 else f"{whole[:300]} ... {whole[-300:]}"


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


# ---- arrays as records --------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
def _dtype_name(dtype: np.dtype[np.generic]) -> str:
    return str(dtype)  # numpy puts it together anew at each call


def spec_of(arrays: Mapping[str, Array]) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return name -> (shape, dtype name) of `arrays`."""
    return {name: (tuple(a.shape), _dtype_name(a.dtype)) for name, a in arrays.items()}


def is_packed(record: ArrayRecord) -> bool:
    """Return whether all arrays of `record` are packed as one."""
    return len(record) == 1 and PACKED in record and record[PACKED].stype == STYPE


def encode(arrays: Mapping[str, Array], packed: bool = False) -> ArrayRecord:
    """Return an ArrayRecord that owns a copy of `arrays`: one Flower array each, or with `packed` one for all."""
    if packed and arrays and packable(spec := spec_of(arrays)):
        return ArrayRecord({PACKED: pack(arrays, spec)})
    record = ArrayRecord()
    for name, array in arrays.items():
        values = np.asarray(array, order="C").reshape(-1).view(np.uint8).data
        data = b"".join((_header(array.shape, array.dtype.str), values))  # the only copy
        record[name] = FlowerArray(dtype=_dtype_name(array.dtype), shape=tuple(array.shape), stype=NUMPY, data=data)
    return record


@functools.lru_cache(maxsize=4096)
def _header(shape: tuple[int, ...], dtype: str) -> bytes:
    """Return the .npy header that numpy writes for a C-ordered array of this shape and dtype."""
    buffer = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype))
    np.lib.format.write_array_header_1_0(buffer, {"descr": descr, "fortran_order": False, "shape": shape})
    return buffer.getvalue()


def decode(record: ArrayRecord, spec: Spec) -> Arrays:
    """Return read-only views into the bytes of `record`, which must match `spec` exactly; nothing in it is trusted.

    Names, shapes, dtypes and byte counts are compared before anything is allocated. An array in Fortran order is
    copied. Reasons of an UploadError: ``missing_array``, ``extra_array``, ``wrong_dtype``, ``wrong_shape``,
    ``malformed_array``, ``non_finite``.
    """
    if is_packed(record) and packable(spec):
        arrays = unpack(record[PACKED], spec)
    elif missing := [name for name in spec if name not in record]:
        raise UploadError("missing_array", f"{len(missing)} of {len(spec)} arrays missing, first {missing[0]!r}")
    elif len(record) != len(spec):
        extra = next(name for name in record if name not in spec)
        raise UploadError("extra_array", f"{str(extra)[:80]!r} is not part of the model")
    else:
        arrays = {name: _decode_one(name, record[name], shape, dtype) for name, (shape, dtype) in spec.items()}
    for name, values in arrays.items():
        if values.dtype.kind == "b" and (values.view(np.uint8) > 1).any():  # numpy would compute with them as they are
            raise UploadError("malformed_array", f"{name} holds bytes that are no boolean")
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise UploadError("non_finite", f"{name} holds NaN or infinity")
    return arrays


def views(record: ArrayRecord) -> Arrays:
    """Return read-only views into the bytes of `record`, from the client's own server; an UploadError if damaged."""
    if is_packed(record):
        return unpack(record[PACKED])
    return {str(name): _decode_one(str(name), one, tuple(one.shape), one.dtype) for name, one in record.items()}


def _decode_one(name: str, array: FlowerArray, shape: tuple[int, ...], dtype: str) -> Array:
    if array.dtype != dtype:
        raise UploadError("wrong_dtype", f"{name}: {str(array.dtype)[:40]!r} instead of {dtype!r}")
    if tuple(array.shape) != shape:
        raise UploadError("wrong_shape", f"{name}: {str(array.shape)[:80]} instead of {shape}")
    data = array.data
    if array.stype != NUMPY or not isinstance(data, bytes):
        raise UploadError("malformed_array", f"{name}: serialisation {str(array.stype)[:40]!r}")
    header = _header(shape, np.dtype(dtype).str)
    start, by_columns = (len(header), False) if data.startswith(header) else npy_header(name, data, shape, dtype)
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if len(data) - start != size:
        raise UploadError("malformed_array", f"{name}: {len(data) - start} bytes of values instead of {size}")
    values = np.frombuffer(data, dtype=dtype, offset=start).reshape(shape, order="F" if by_columns else "C")
    if by_columns:  # as scikit-learn's coefficients are
        values = np.ascontiguousarray(values)
        values.setflags(write=False)
    return values
