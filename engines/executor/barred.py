"""Revoked keys stay revoked: the SuperLink keeps a record of them beside its database.

Flower's database alone says which keys are revoked. Its file is lost, or an older copy takes its place, and whoever was
shut out since is let in again; what was revoked in the last seconds before a loss of power may not be on the disk yet
(SQLite, ``synchronous=NORMAL``). So the SuperLink writes each key into :data:`FILE`, in the database's folder and
flushed to the disk, before the database has it as revoked and before the call is answered. At its start it makes both
agree (:func:`agree`): what one of them has as revoked is revoked in the other. The file outlives the database's, also
if that has another name; only an older copy of the file itself forgets. While the SuperLink runs, a recorded key is
nobody's, whatever the database says, so a full disk keeps none in.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import json
import os
import shlex
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from typing import Any

#: The record's name in the folder of the database.
FILE = "revoked-keys.json"
#: Status of an answer: the key is shut out, but this is not on the disk as it should be.
UNRECORDED = 507


def beside(database: Path) -> Path:
    """Return where the record of this database lies."""
    return Path(os.path.realpath(database)).parent / FILE


def read(path: Path) -> dict[bytes, str]:
    """Return the keys in the record and since when each is revoked (ISO 8601); none if there is no record.

    Raises
    ------
    ValueError
        If it cannot be read, others can write it, or it is a link to where nothing is.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            told = json.loads(file.read())
        keys = {base64.b64decode(one["key"], validate=True): str(one["revoked"]) for one in told["keys"]}
    except FileNotFoundError as error:
        if not path.is_symlink():
            return {}
        target = os.path.realpath(path)
        raise ValueError(
            f"{path}: a link to {target}, which is not there, and it says which keys are revoked. Is its disk mounted? "
            f"If there never was one: echo '{{\"keys\": []}}' > {shlex.quote(target)}"
        ) from error
    except OSError as error:
        said = f"{path}: cannot be read ({error.strerror}), and it says which keys are revoked."
        raise ValueError(f"{said} {_cure(path, error)}") from error
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
            f"{path}: no readable record of revoked keys ({error!r}). Bring its newest copy back. If there is none, "
            "remove it: the SuperLink makes it again of what its database has as revoked; revoke again what was "
            "revoked since, if the database is an older copy."
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ValueError(
            f"{path}: mode {mode:o}, so others on this machine can take revoked keys off it. Close it: chmod 600 "
            f"{shlex.quote(str(path))}\nIf somebody may have changed it, compare it with a copy."
        )
    return keys


def _cure(path: Path, error: OSError) -> str:
    """Return what to do about a record that cannot be read."""
    if error.errno == errno.EISDIR:
        return "It is a folder: move that away, and bring the record's newest copy back."
    if error.errno == errno.ELOOP:
        return "It is a link that leads in a circle: put the record's newest copy in its place."
    return strangers(path) or "Run as the owner of the SuperLink's database."


def strangers(path: Path) -> str:
    """Return what to do about a record whose owner is not that of its folder, as when root has made it; "" if it is."""
    with contextlib.suppress(OSError):
        place = Path(os.path.realpath(path))
        owner, folder = place.stat().st_uid, place.parent.stat()
        if owner != folder.st_uid:
            return (
                f"User {owner} owns it, and user {folder.st_uid} its folder: chown {folder.st_uid}:{folder.st_gid} "
                f"{shlex.quote(str(place))}"
            )
    return ""


def open_folder(database: Path) -> str:
    """Return what to say of a folder in which others can replace the database and its record; "" of another one."""
    folder = beside(database).parent
    mode = stat.S_IMODE(folder.stat().st_mode)
    if not mode & stat.S_IWOTH or mode & stat.S_ISVTX:
        return ""
    return (
        f"{folder}: mode {mode:o}, so others on this machine can replace the SuperLink's database and {FILE}, and let "
        f"revoked keys in: chmod o-w {shlex.quote(str(folder))}"
    )


def short(key: bytes) -> str:
    """Return a key's name in tables, as ``core.trust.admission.fingerprint`` does."""
    return hashlib.sha256(key).hexdigest()[:16]


class Record:
    """The keys that are revoked, in a file.

    Parameters
    ----------
    path : Path
        Of the file, which need not be there; of a link, what it leads to is written.
    database : Path, optional
        Whose owner gets what root writes, unless that is root: then the owner of the folder.

    Raises
    ------
    ValueError
        If it cannot be read.
    """

    def __init__(self, path: Path, database: Path | None = None) -> None:
        self._keys = read(path)  # of a link, before it is followed
        self.path, self._database = Path(os.path.realpath(path)), database
        self._turn, self._unwritten = threading.Lock(), False

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def __iter__(self) -> Any:
        return iter(tuple(self._keys))

    def add(self, keys: Iterable[bytes]) -> None:
        """Record `keys` as revoked; they are on the disk at the end.

        Raises
        ------
        OSError
            If the file cannot be written; the next call writes these keys too.
        """
        with self._turn:
            new = [key for key in keys if key not in self._keys]
            now = datetime.now(UTC).isoformat(timespec="seconds")
            self._keys |= dict.fromkeys(new, now)
            self._unwritten = self._unwritten or bool(new)
            if self._unwritten:
                self._write()
                self._unwritten = False

    def _write(self) -> None:
        with contextlib.suppress(ValueError):  # another SuperLink's database in the same folder
            self._keys = read(self.path) | self._keys
        told = [
            {"key": base64.b64encode(key).decode(), "fingerprint": short(key), "revoked": when}
            for key, when in self._keys.items()
        ]
        part = self.path.with_name(f".{self.path.name}.part")
        part.unlink(missing_ok=True)  # another user's, root's perhaps, that was killed
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            _inherit(descriptor, part.parent, self._database)
            file.write(json.dumps({"keys": told}, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _inherit(descriptor: int, folder: Path, database: Path | None) -> None:
    """Give what root writes to the owner of the database, or of the folder; the service's user must read it."""
    if os.geteuid() == 0:
        owner = folder.stat()
        if database is not None and database.exists() and database.stat().st_uid != 0:
            owner = database.stat()
        with contextlib.suppress(PermissionError):
            os.fchown(descriptor, owner.st_uid, owner.st_gid)


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
        fault = _recorded(record, _keys(state, owner_aid, node_id))
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


def _keys(state: Any, owner_aid: str, node_id: int) -> list[bytes]:
    """Return the key of a node of this owner that is not revoked; nothing is written, for the disk may be full."""
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.state.schema.linkstate_models import Node
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import select

    asked = select(Node.public_key).where(
        Node.node_id == uint64_to_int64(node_id),
        Node.owner_aid == owner_aid,
        Node.status != NodeStatus.UNREGISTERED,
    )
    with state.session() as session:
        return [key for key in session.scalars(asked) if key]


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


def _recorded(record: Record, keys: Iterable[bytes]) -> str:
    """Record `keys`; return what is wrong if the disk does not take it."""
    try:
        record.add(keys)
    except OSError as error:
        return (
            f"revoked, but {record.path.name} cannot be written ({error.strerror}), so an older copy of the database "
            "would let the key in. Free or open the disk of the database, then restart the SuperLink, which writes it."
        )
    return ""
