"""What the SuperLink tells a device whose run is over, by itself or because somebody has stopped it.

Flower asks for the run's status once, at the beginning of a call; then it answers 403, and the SuperNode drops what it
sends. Two things are added here:

- If the run ends in the middle of such a call, Flower stores nothing and says nothing: :func:`check` asks once more.
- A confirmation that comes after the end is taken. The device has the message and works on it already. Flower's
  SuperNode, refused, keeps the message and answers the next one with the reply to it, and so on (:mod:`leftovers`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from flwr.common.constant import Status
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse
from flwr.server.superlink.utils import check_abort
from flwr.supercore.error import ApiErrorCode, FlowerError

#: Flower's code for a call that the run's status does not allow.
CODE = ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED


def check(state: Any, run: int, node: int) -> None:
    """Raise what Flower raises for a call of `node` if `run` is over.

    Raises
    ------
    FlowerError
        If it is; status 403 for the device.
    """
    if why := check_abort(run, [Status.FINISHED], state):
        raise FlowerError(CODE, f"SuperNode {node}, exception: {why}")


def received(confirm: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler of a device's confirmation, which also takes one whose run is over."""

    @functools.wraps(confirm)
    def handler(**call: Any) -> Any:
        try:
            return confirm(**call)
        except FlowerError as error:
            if error.code != CODE:
                raise
        return ConfirmMessageReceivedResponse()

    return handler
