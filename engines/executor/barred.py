"""Revoked keys stay revoked: the SuperLink keeps a record of them beside its database.

Flower's database alone says which keys are revoked. Its file is lost, or an older copy takes its place, and whoever was
shut out since is let in again; what was revoked in the last seconds before a loss of power may not be on the disk yet
(SQLite, ``synchronous=NORMAL``). So the SuperLink writes each key into :data:`FILE`, in the database's folder and
flushed to the disk, before the database has it as revoked and before the call is answered. At its start it makes both
agree (:func:`agree`): what one of them has as revoked is revoked in the other. The file outlives the database's, also
if that has another name; only an older copy of the file itself forgets.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import json
import os
import sys
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from logging import WARNING
from pathlib import Path
from typing import Any

#: The record's name in the folder of the database.
FILE = "revoked-keys.json"
#: Status of an answer: the key is shut out, but this is not on record.
UNRECORDED = 507


def beside(database: Path) -> Path:
    """Return where the record of this database lies."""
    return Path(os.path.realpath(database)).parent / FILE


def read(path: Path) -> dict[bytes, str]:
    """Return the keys in the record and since when each is revoked (ISO 8601); none if there is no record.

    Raises
    ------
    ValueError
        If it cannot be read.
    """
    try:
        told = json.loads(path.read_bytes())
        return {base64.b64decode(one["key"], validate=True): str(one["revoked"]) for one in told["keys"]}
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be read ({error.strerror}), and it says which keys are revoked. Run as the owner of the "
            "SuperLink's database."
        ) from error
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path}: no readable record of revoked keys ({error!r}). Bring its newest copy back. If there is none, "
            "remove it: the SuperLink makes it again of what its database has as revoked; revoke again what was "
            "revoked since, if the database is an older copy."
        ) from error


def short(key: bytes) -> str:
    """Return a key's name in tables, as ``core.trust.admission.fingerprint`` does."""
    return hashlib.sha256(key).hexdigest()[:16]


class Record:
    """The keys that are revoked, in a file.

    Parameters
    ----------
    path : Path
        Of the file, which need not be there; of a link, what it leads to is written.

    Raises
    ------
    ValueError
        If it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))
        self._keys = read(self.path)
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
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps({"keys": told}, indent=1).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.path)
        folder = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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

    from .turns import in_file

    states: Any = SqlLinkState
    initialize, delete_node = states.initialize, states.delete_node

    @functools.wraps(initialize)
    def initialized(state: Any, *arguments: Any, **named: Any) -> Any:
        found = initialize(state, *arguments, **named)
        if in_file(state):
            state.fedcross_barred = _opened(state)
        return found

    @functools.wraps(delete_node)
    def deleted(state: Any, owner_aid: str, node_id: int) -> None:
        record: Record | None = getattr(state, "fedcross_barred", None)
        fault = "" if record is None else _recorded(record, state.get_node_info(node_ids=[node_id]), owner_aid)
        delete_node(state, owner_aid, node_id)
        if fault:
            from fastapi import HTTPException

            raise HTTPException(UNRECORDED, fault)

    states.initialize, states.delete_node = initialized, deleted


def _opened(state: Any) -> Record:
    """Return the record beside the state's file, with which the state agrees; end the process if there is none."""
    from sqlalchemy.engine import make_url

    path = beside(Path(str(make_url(state.database_url).database)))
    try:
        record = Record(path)
        agree(state, record)
    except ValueError as error:
        sys.exit(str(error))
    except OSError as error:
        sys.exit(f"{path}: cannot be written ({error.strerror}), and it keeps revoked keys out. Free or open its disk.")
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
