"""An error in the place of a reply that the SuperLink refuses, so that the server does not wait for that reply.

Only for a request to the calling node itself, whose key the SuperLink has checked: nobody ends another's request.
Flower takes one reply to a request, so a right one that the device sends later to the same request is not stored. The
server asks a device once more whose reply came without its request's nonce (``strategies/round/exchange.py``): the
answer to that request counts.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from flwr.app import Error
from flwr.app.message import make_message
from flwr.app.metadata import Metadata
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.supercore.inflatable.inflatable_object import get_object_tree, no_object_id_recompute

#: The error's code, ``core.allowance.REFUSED``.
REFUSED = 1100
#: Most characters of the reason.
LONGEST = 400


@dataclass(frozen=True)
class Asked:
    """What the SuperLink has of a request; `until` is when it expires, both times in seconds since 1970."""

    run: int
    node: int
    created_at: float
    until: float
    kind: str


def asked_for(state: Any, name: str) -> Asked | None:
    """Return the request `name`; None if there is none (any more: the server has its reply, or the run is over)."""
    if hasattr(state, "message_ins_store"):  # Flower's state in memory
        found = state.message_ins_store.get(name)
        told = found and found.metadata
        return told and Asked(
            told.run_id, told.dst_node_id, told.created_at, told.created_at + told.ttl, told.message_type
        )
    from flwr.supercore.state.schema.linkstate_models import MessageIns as Row
    from flwr.supercore.utils import int64_to_uint64
    from sqlalchemy import select

    wanted = select(Row.run_id, Row.dst_node_id, Row.created_at, Row.ttl, Row.message_type)
    with state.session() as session:
        row = session.execute(wanted.where(Row.message_id == name)).one_or_none()
    if row is None:
        return None
    run, node = int64_to_uint64(row.run_id), int64_to_uint64(row.dst_node_id)
    return Asked(run, node, row.created_at, row.created_at + row.ttl, row.message_type)


def reply_to(state: Any, name: str) -> str | None:
    """Return the name of the reply to the request `name` that the SuperLink has stored, None if it has none."""
    if hasattr(state, "message_ins_store"):
        found: str | None = state.message_ins_id_to_message_res_id.get(name)
        return found
    from flwr.supercore.state.schema.linkstate_models import MessageRes as Row
    from sqlalchemy import select

    with state.session() as session:
        stored: str | None = session.scalar(select(Row.message_id).where(Row.reply_to_message_id == name))
        return stored


def waits_for(state: Any, name: str, node: int, now: float) -> Asked | None:
    """Return the request `name` if it went to `node`, has not expired and has no reply; else None."""
    asked = asked_for(state, name) if name else None
    if asked is None or asked.node != node or not now < asked.until or reply_to(state, name) is not None:
        return None
    return asked


def report(state: Any, name: str, node: int, why: str, now: float | None = None) -> bool:
    """Store an error as the reply of `node` to the request `name`; return whether it is stored.

    Parameters
    ----------
    state : LinkState
        Flower's.
    name : str
        The request.
    node : int
        Who calls; nothing is stored for a request to another node, or one that has a reply, is not there or is over.
    why : str
        The reason, in one line.
    now : float, optional
        Seconds since 1970.
    """
    now = time.time() if now is None else now
    asked = waits_for(state, name, node, now)
    if asked is None:
        return False
    created = max(now, asked.created_at)
    metadata = Metadata(
        run_id=asked.run, message_id="", src_node_id=node, dst_node_id=SUPERLINK_NODE_ID, reply_to_message_id=name,
        group_id="", created_at=created, ttl=asked.until - created, message_type=asked.kind,
    )  # fmt: skip
    message = make_message(metadata=metadata, error=Error(REFUSED, why[:LONGEST]))
    with no_object_id_recompute():
        content, tree = message.deflate(), get_object_tree(message)
    metadata.__dict__["_message_id"] = tree.object_id
    with state.session() if hasattr(state, "session") else nullcontext():
        session = state.start_session(asked.run)
        stored, missing = state.store_message_and_object_tree(message, tree, session)
        if stored and missing and not state.store_object(asked.run, session, tree.object_id, content):
            raise RuntimeError("the error's object could not be stored")  # undoes the rest
        return bool(stored)


def replace(state: Any, reply: str, node: int, why: str) -> bool:
    """Store an error in the place of a reply that cannot be completed; return whether it is stored.

    Its topmost object and its upload are deleted, :mod:`sweep` deletes the objects below. If the server has seen the
    reply's announcement already, Flower has deleted the request: then the server finds that the object is gone.

    Parameters
    ----------
    state : LinkState
        Flower's.
    reply : str
        A reply that `node` has announced.
    node : int
        Who calls; another node's reply stays.
    why : str
        The reason, in one line.
    """
    with state.session() if hasattr(state, "session") else nullcontext():
        found = _row(state, reply)
        if found is not None and found[0] != node:
            return False
        _forget(state, reply)
        state.object_store.delete(reply)
        return found is not None and report(state, found[1], node, why)


def _row(state: Any, reply: str) -> tuple[int, str] | None:
    """Return sender and request of a stored reply, None if it is not stored (any more)."""
    if hasattr(state, "message_res_store"):
        found = state.message_res_store.get(reply)
        return found and (found.metadata.src_node_id, found.metadata.reply_to_message_id)
    from flwr.supercore.state.schema.linkstate_models import MessageRes as Row
    from flwr.supercore.utils import int64_to_uint64
    from sqlalchemy import select

    with state.session() as session:
        row = session.execute(
            select(Row.src_node_id, Row.reply_to_message_id).where(Row.message_id == reply)
        ).one_or_none()
    return row and (int64_to_uint64(row.src_node_id), row.reply_to_message_id)


def _forget(state: Any, reply: str) -> None:
    """Delete the row of a reply, and its upload."""
    if hasattr(state, "message_res_store"):
        if found := state.message_res_store.pop(reply, None):
            state.message_ins_id_to_message_res_id.pop(found.metadata.reply_to_message_id, None)
        state._cleanup_push_session(state._object_push_session_by_root.get(reply), cleanup_messages=False)
        return
    from flwr.supercore.state.schema.corestate_models import ObjectPushSession as Upload
    from flwr.supercore.state.schema.corestate_models import ObjectPushSessionRoot as Root
    from flwr.supercore.state.schema.linkstate_models import MessageRes as Row
    from sqlalchemy import delete, select

    with state.session() as session:
        session.execute(delete(Row).where(Row.message_id == reply))
        uploads = select(Root.session_id).where(Root.root_object_id == reply)
        session.execute(delete(Upload).where(Upload.session_id.in_(uploads)))
