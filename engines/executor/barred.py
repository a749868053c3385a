"""Revoked keys stay revoked: the SuperLink keeps a record of them beside its database.

Flower's database alone says which keys are revoked. Its file is lost, or an older copy takes its place, and whoever was
shut out since is let in again; what was revoked in the last seconds before a loss of power may not be on the disk yet
(SQLite, ``synchronous=NORMAL``). So the SuperLink writes each key into a file (:mod:`recorded`), in the database's
folder and flushed to the disk, before the database has it as revoked and before the call is answered. At its start it
makes both agree (:func:`agree`): what one of them has as revoked is revoked in the other. The file outlives the
database's, also if that has another name; only an older copy of the file itself forgets. While the SuperLink runs, a
recorded key is nobody's, whatever the database says, so a full disk keeps none in.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from logging import WARNING
from pathlib import Path
from typing import Any

from .recorded import FILE, Record, beside, short

#: Status of an answer: the key is shut out, but this is not on the disk as it should be.
UNRECORDED = 507


def agree(state: Any, record: Record) -> None:
    """Revoke in the database what the record has, and the other way round.

    A key that the database does not know becomes a revoked node of it, so that the database refuses it itself.
    """
    from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
    from flwr.common.logger import log
    from flwr.supercore.constant import NodeStatus

    nodes = {node.public_key: node for node in state.get_node_info() if node.public_key}
    record.add(key for key, node in nodes.items() if node.status == NodeStatus.UNREGISTERED)
    registered = [key for key in record if key in nodes and nodes[key].status != NodeStatus.UNREGISTERED]
    unknown = [key for key in record if key not in nodes]
    for key in registered:
        state.delete_node(nodes[key].owner_aid, nodes[key].node_id)
    for key in unknown:
        number = state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, HEARTBEAT_DEFAULT_INTERVAL)
        state.delete_node(NOOP_FLWR_AID, number)
    if again := [*registered, *unknown]:
        said = (
            "fedcross: the database did not have %d of the keys as revoked that %s records, as an older copy or a new "
            "file does not: they are revoked again (%s). Register the devices that were registered since that copy."
        )
        log(WARNING, said, len(again), record.path, ", ".join(map(short, again[:10])))


def attach() -> None:
    """Let the SuperLink of this process keep the record; a state in memory stays Flower's."""
    from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
    from sqlalchemy.exc import OperationalError

    from .turns import in_file

    states: Any = SqlLinkState
    initialize, delete_node = states.initialize, states.delete_node
    number_of, listed = states.get_node_id_by_public_key, states.get_node_info
    tag, untagged = states._check_and_tag_offline_nodes, ContextVar("untagged", default=False)

    @functools.wraps(initialize)
    def initialized(state: Any, *arguments: Any, **named: Any) -> Any:
        found = initialize(state, *arguments, **named)
        if in_file(state):
            state.fedcross_barred = _opened(state)
        return found

    @functools.wraps(delete_node)
    def deleted(state: Any, owner_aid: str, node_id: int) -> None:
        if (record := _of(state)) is None:
            delete_node(state, owner_aid, node_id)
            return
        fault = _recorded(record, state.get_node_info(node_ids=[node_id]), owner_aid)
        with _told(fault):
            delete_node(state, owner_aid, node_id)

    @functools.wraps(number_of)
    def numbered(state: Any, public_key: bytes) -> Any:
        barred = public_key in (_of(state) or ())
        return None if barred else number_of(state, public_key)

    @functools.wraps(listed)
    def listing(state: Any, **named: Any) -> Any:
        try:
            return listed(state, **named)
        except OperationalError:  # a full disk, and whoever revokes lists the nodes first
            if _of(state) is None:
                raise
        before = untagged.set(True)
        try:
            return listed(state, **named)
        finally:
            untagged.reset(before)

    @functools.wraps(tag)
    def tagged(state: Any, *arguments: Any, **named: Any) -> None:
        if not untagged.get():
            tag(state, *arguments, **named)

    states.initialize, states.delete_node, states.get_node_info = initialized, deleted, listing
    states.get_node_id_by_public_key, states._check_and_tag_offline_nodes = numbered, tagged


def _of(state: Any) -> Record | None:
    """Return the record of a state that is in a file, once it is open."""
    found: Record | None = getattr(state, "fedcross_barred", None)
    return found


@contextlib.contextmanager
def _told(fault: str) -> Iterator[None]:
    """Answer a call in words if the database does not take what the block writes, or after a `fault` of the record."""
    from fastapi import HTTPException
    from sqlalchemy.exc import OperationalError

    try:
        yield
    except OperationalError as error:
        said = (
            f"shut out, but the database cannot be written ({error.orig}), so it lists the key as registered still. "
            "Free or open its disk, then revoke the key again, or restart the SuperLink."
        )
        raise HTTPException(UNRECORDED, f"{said} {fault}".strip()) from error
    if fault:
        raise HTTPException(UNRECORDED, fault)


def _opened(state: Any) -> Record:
    """Return the record beside the state's file, with which the state agrees; end the process if there is none."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import OperationalError

    database = Path(str(make_url(state.database_url).database))
    path = beside(database)
    try:
        record = Record(path, database)
        agree(state, record)
    except ValueError as error:
        sys.exit(str(error))
    except OperationalError as error:
        sys.exit(f"{state.database_url}: cannot be written ({error.orig}), and keys of {path} are to be revoked in it.")
    except OSError as error:
        named = error.filename or path
        sys.exit(f"{named}: cannot be written ({error.strerror}): {FILE} keeps revoked keys out. Free its disk.")
    return record


def _recorded(record: Record, nodes: Iterable[Any], owner: str) -> str:
    """Record the keys of those `nodes` that are the owner's; return what is wrong if the disk does not take it."""
    try:
        record.add(node.public_key for node in nodes if node.owner_aid == owner and node.public_key)
    except OSError as error:
        return (
            f"revoked, but {record.path.name} cannot be written ({error.strerror}), so an older copy of the database "
            "would let the key in. Free or open the disk of the database, then restart the SuperLink, which writes it."
        )
    return ""
