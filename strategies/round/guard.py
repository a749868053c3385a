"""The guard: it alone accepts or rejects replies, before any other code uses them.

It trusts nothing that a client sends: it checks every field against the ticket of the request that the reply claims to
answer, and arrays against the declared model before it allocates any memory for them.
"""

from __future__ import annotations

import hmac
import math

from flwr.app import Message, MetricRecord
from flwr.common.constant import ErrorCode

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Upload
from fedcross.strategies.round.ledger import LOST
from fedcross.strategies.wire.protocol import EXTRA, SCALES, Expected, Payload
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
#: Most characters of an error's text that are kept: its beginning, which says what is wrong, and its end.
SHOWN = 600


def check(message: Message, payload: Payload, expected: Expected, *, nonce: bool = True) -> Upload:
    """Return the upload in `message`, or raise an error with the reason why it is rejected.

    Parameters
    ----------
    message : Message
        A reply as it came from the grid.
    payload : Payload
        What was sent.
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
            place = f" ({shown(config['file'])}:{shown(config.get('line'))})" if config.get("file") else ""
            where = "" if config["error"] == "ConfigError" else place
            raise UploadError("client_error", f"{shown(config['error'])}: {shown(config.get('detail'))}{where}")
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
        task=payload.task,
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
