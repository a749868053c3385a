"""What an upload must pass before anyone looks at it.

Nothing a client sends is trusted: every field is checked against the ticket of the request it claims to answer, and
arrays are checked against the declared model before any memory is allocated for them.
"""

from __future__ import annotations

import hmac
import math

from flwr.app import Message, MetricRecord

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.protocol import EXTRA, SCALES, Expected, Upload
from fedcross.strategies.wire.records import decode, nbytes

#: More examples than this in one client is not believed.
MAX_EXAMPLES = 2**40
#: A reply carries a handful of metrics; more is not believed.
MAX_METRICS = 64


def check(message: Message, expected: Expected, *, nonce: bool = True) -> Upload:
    """Return the upload in `message`, or raise with the reason it must not be used.

    Parameters
    ----------
    message : Message
        A reply as it came from the grid.
    expected : Expected
        What the request asked for.
    nonce : bool
        Whether the reply must echo the request's run, round, slot and nonce. Plain Flower clients do not; their replies
        are bound by Flower's own reply id only.

    Raises
    ------
    UploadError
        With reason ``client_error``, ``malformed_message``, ``wrong_round``, ``wrong_slot``, ``wrong_nonce``,
        ``bad_examples``, ``bad_metrics`` or one of :func:`strategies.wire.records.decode`.
    """
    if message.has_error():
        raise UploadError("client_error", f"code {message.error.code}: {str(message.error.reason)[-300:]}")
    if not message.has_content():
        raise UploadError("malformed_message", "a reply without content")
    content = message.content
    groups = {"arrays": expected.model, **{EXTRA + name: spec for name, spec in expected.extras.items()}}
    if expected.scales:
        groups[SCALES] = expected.scales
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
    return Upload(
        client=expected.client,
        slot=expected.slot,
        arrays=decoded.pop("arrays"),
        scales=decoded.pop(SCALES, {}),
        extras={name.removeprefix(EXTRA): arrays for name, arrays in decoded.items()},
        num_examples=num_examples,
        metrics=metrics,
        nbytes=sum(nbytes(spec) for spec in groups.values()),
    )


def _check_origin(message: Message, expected: Expected) -> None:
    """Check that the reply answers exactly this request."""
    if "config" not in message.content.config_records:
        raise UploadError("malformed_message", "config is a record of another kind")
    config = message.content.config_records["config"]
    nonce = config.get("nonce")
    if not isinstance(nonce, str) or not hmac.compare_digest(nonce.encode(), expected.nonce.encode()):
        raise UploadError("wrong_nonce", "the reply belongs to another request")
    if config.get("run") != expected.run or (config.get("round"), config.get("exchange")) != (
        expected.round,
        expected.exchange,
    ):
        raise UploadError("wrong_round", f"round {str(config.get('round'))[:20]} instead of {expected.round}")
    if (config.get("client"), config.get("slot")) != (expected.client, expected.slot):
        raise UploadError("wrong_slot", f"slot {str(config.get('slot'))[:20]} instead of {expected.slot}")


def check_metrics(record: MetricRecord) -> tuple[int, dict[str, float]]:
    """Return the number of examples and the other metrics, all finite."""
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
        metrics[str(name)] = float(value)
    return examples, metrics
