"""One key for a partition: the SuperLink refuses to register a second one, whoever asks at the same time.

``fedcross deploy register`` looks first and registers then. Two operators, on two machines, would both find the
partition free. So the SuperLink looks once more, one registration after the other. The name of a node is
``core.trust.admission.node_name``.
"""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from collections.abc import Callable
from typing import Any

from fastapi import HTTPException
from flwr.supercore.constant import NodeStatus

#: As ``core.trust.admission`` reads it.
NAME = re.compile(r"partition-(0|[1-9]\d{0,8})")
CONFLICT = 409


def one_key(register_node: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler that registers a node, which gives no partition to a second key."""
    turn = threading.Lock()

    @functools.wraps(register_node)
    def call(request: Any, account: Any, state: Any) -> Any:
        with turn:
            if found := NAME.fullmatch(request.name):
                _refuse_second(found[1], request, state)
            return register_node(request, account, state)

    return call


def _refuse_second(partition: str, request: Any, state: Any) -> None:
    for node in state.get_node_info():
        other = node.public_key != request.public_key and node.status != NodeStatus.UNREGISTERED
        if other and node.name == request.name:
            key = hashlib.sha256(node.public_key).hexdigest()[:16]
            raise HTTPException(
                CONFLICT,
                f"partition {partition}: it belongs to key {key} (node {node.node_id}). Choose another partition.",
            )
