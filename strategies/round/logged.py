"""Which logged uploads a round that is repeated after a crash can use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from logging import WARNING
from typing import TYPE_CHECKING, Any

from flwr.common.logger import log

from fedcross.strategies.round.federation import ReplyLog
from fedcross.strategies.wire.protocol import Payload, Round, Upload

if TYPE_CHECKING:
    from fedcross.strategies.round.base import Method


def answering(method: Method[Any], logged: ReplyLog, place: Round, payloads: Sequence[Payload]) -> Iterator[Upload]:
    """Yield the uploads that `logged` has of the exchange at `place`; count the requests of `method` for all of them.

    One that answers none of `payloads` is left out with a warning: the run goes on with other settings or other
    devices, or the log is of a version that did not store the devices' widths.
    """
    sent = {payload.slot: payload for payload in payloads}
    for upload in logged.accepted(place):
        method.requests[upload.client] += 1
        if why := _mismatch(method, upload, sent.get(upload.slot)):
            what = f"the logged reply of client {upload.client} for slot {upload.slot} is not used: {why}"
            log(WARNING, "fedcross: round %s: %s", place.number, what)
        else:
            yield upload


def _mismatch(method: Method[Any], upload: Upload, payload: Payload | None) -> str:
    """Return why `upload` is no answer to what its slot sends, `payload`; empty if it is one."""
    if payload is None:
        return "no model goes out in this slot now"
    if upload.client != payload.client and not method.interchangeable:
        return f"the slot's model goes to client {payload.client} now"
    groups = {"": method.upload_model(payload), **method.upload_extras(payload)}
    expected = {group: {name: shape for name, (shape, _) in spec.items()} for group, spec in groups.items()}
    sent = {"": upload.arrays, **upload.extras}
    if {group: {name: array.shape for name, array in found.items()} for group, found in sent.items()} != expected:
        return "it has other shapes than the slot's model has now"
    return ""
