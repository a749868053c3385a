"""What Flower's store of objects has of an object: whose children it says it has, and whether its content is there.

Flower keeps the children of an object under its name, once for all messages. :mod:`claims` decides whose word counts;
here is how it is read and written, in the store in memory and in the database.
"""

from __future__ import annotations

import hashlib
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.object_store import NoObjectInStoreError

#: Message, table of records, record, array, chunk: Flower's messages have no more levels.
DEPTH = 5
#: Names in one question to the database.
SOME = 500
_SECRET = secrets.token_hex(16)


@dataclass(frozen=True)
class Known:
    """The children that the store has of an object, and whether its content is there."""

    children: frozenset[str]
    stored: bool


def rows_of(state: Any) -> Rows:
    """Return how to read and write the objects of Flower's `state`."""
    return (_Memory if hasattr(state, "message_ins_store") else _Database)(state)


def pin_of(name: str) -> str:
    """Return the name of what keeps the former children of an object: an object of no message.

    Nobody can guess it, because who can name an object that no other has can delete it.
    """
    return hashlib.sha256(f"{_SECRET} keeps what was below {name}".encode()).hexdigest()


class Rows(ABC):
    """What both stores have in common."""

    def __init__(self, state: Any) -> None:
        self.state, self.store = state, state.object_store

    @abstractmethod
    def turn(self) -> AbstractContextManager[Any]:
        """Return what keeps others from changing the objects."""

    @abstractmethod
    def known(self, names: Iterable[str]) -> dict[str, Known]:
        """Return what is known of those that are there."""

    @abstractmethod
    def relink(self, run: int, name: str, children: frozenset[str]) -> None:
        """Let the object have these children; those that are not there are registered for the run."""

    @abstractmethod
    def parents(self, names: set[str]) -> set[str]:
        """Return the objects that have one of these as a child."""

    @abstractmethod
    def children(self, names: set[str]) -> set[str]:
        """Return the children of all these."""

    @abstractmethod
    def requests(self, names: set[str]) -> bool:
        """Return whether one of these is a request of the server."""

    @abstractmethod
    def root(self, session: str) -> str | None:
        """Return the message that is uploaded in this session of Flower's."""

    def pin(self, run: int, name: str) -> None:
        """Keep the children that the object has now, whatever it will have, until :meth:`unpin` or the run's end."""
        pin = pin_of(name)
        known = self.known([name, pin])
        if known[name].children:
            if pin not in known:
                self.store.preregister(run, ObjectTree(object_id=pin))
            self.relink(run, pin, known[name].children | (known[pin].children if pin in known else frozenset()))

    def unpin(self, name: str) -> None:
        """Keep the object's former children no longer than others need them."""
        self.store.delete(pin_of(name))

    def servers(self, name: str) -> bool:
        """Return whether the object is part of a request of the server that is still there."""
        level, seen = {name}, {name}
        for _ in range(DEPTH):
            if self.requests(level):
                return True
            level = self.parents(level) - seen
            seen |= level
            if not level:
                break
        return False

    def below(self, name: str) -> ObjectTree:
        """Return the object with all that is below it as its children, each once.

        Raises
        ------
        NoObjectInStoreError
            If it is not there.
        """
        if name not in self.store:
            raise NoObjectInStoreError(f"Object {name} was not pre-registered.")
        level, seen = {name}, {name}
        while level:
            level = self.children(level) - seen
            seen |= level
        return ObjectTree(object_id=name, children=[ObjectTree(object_id=one) for one in sorted(seen - {name})])


class _Memory(Rows):
    """Flower's store in memory."""

    def turn(self) -> AbstractContextManager[Any]:
        """Return what keeps others from changing the objects."""
        lock: AbstractContextManager[Any] = self.store.lock_store
        return lock

    def known(self, names: Iterable[str]) -> dict[str, Known]:
        """Return what is known of those that are there."""
        found = ((name, self.store.store.get(name)) for name in names)
        return {name: Known(frozenset(one.child_object_ids), one.is_available) for name, one in found if one}

    def relink(self, run: int, name: str, children: frozenset[str]) -> None:
        """Let the object have these children; those that are not there are registered for the run."""
        entries = self.store.store
        for child in children - entries.keys():
            self.store.preregister(run, ObjectTree(object_id=child))
        if name in entries:
            for child in entries[name].child_object_ids:
                entries[child].ref_count -= 1
            for child in children:
                entries[child].ref_count += 1
            entries[name].child_object_ids = sorted(children)

    def parents(self, names: set[str]) -> set[str]:
        """Return the objects that have one of these as a child."""
        with self.turn():
            return {name for name, one in self.store.store.items() if not names.isdisjoint(one.child_object_ids)}

    def requests(self, names: set[str]) -> bool:
        """Return whether one of these is a request of the server."""
        return not names.isdisjoint(self.state.message_ins_store)

    def root(self, session: str) -> str | None:
        """Return the message that is uploaded in this session of Flower's."""
        roots = self.state._object_push_session_by_root.items()
        return next((root for root, one in list(roots) if one == session), None)

    def children(self, names: set[str]) -> set[str]:
        """Return the children of all these."""
        return {child for one in self.known(names).values() for child in one.children}


class _Database(Rows):
    """Flower's store in a database."""

    def turn(self) -> AbstractContextManager[Any]:
        """Return a transaction in which nobody else changes the objects."""
        transaction: AbstractContextManager[Any] = self.store._mutation_session()
        return transaction

    def known(self, names: Iterable[str]) -> dict[str, Known]:
        """Return what is known of those that are there."""
        from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
        from sqlalchemy import select

        found: dict[str, Known] = {}
        with self.store.session() as session:
            for some in _portions(names):
                here = select(StoredObject.object_id, StoredObject.is_available).where(StoredObject.object_id.in_(some))
                pairs = select(ObjectChild.parent_id, ObjectChild.child_id).where(ObjectChild.parent_id.in_(some))
                children: dict[str, set[str]] = {}
                for parent, child in session.execute(pairs):
                    children.setdefault(parent, set()).add(child)
                for name, stored in session.execute(here):
                    found[name] = Known(frozenset(children.get(name, ())), bool(stored))
        return found

    def relink(self, run: int, name: str, children: frozenset[str]) -> None:
        """Let the object have these children; those that are not there are registered for the run."""
        from flwr.supercore.state.schema.objectstore_models import ObjectChild, StoredObject
        from sqlalchemy import delete, insert, select, update

        before = self.known([name]).get(name)
        for child in children - self.known(children).keys():
            self.store.preregister(run, ObjectTree(object_id=child))
        if before is None:
            return
        with self.store.session() as session:
            gone = list(session.scalars(select(ObjectChild.child_id).where(ObjectChild.parent_id == name)))
            session.execute(delete(ObjectChild).where(ObjectChild.parent_id == name))
            count = StoredObject.ref_count
            for some in _portions(gone):
                fewer = update(StoredObject).where(StoredObject.object_id.in_(some), count > 0)
                session.execute(fewer.values(ref_count=count - 1))
            for some in _portions(sorted(children)):
                session.execute(insert(ObjectChild), [{"parent_id": name, "child_id": child} for child in some])
                more = update(StoredObject).where(StoredObject.object_id.in_(some))
                session.execute(more.values(ref_count=count + 1))

    def parents(self, names: set[str]) -> set[str]:
        """Return the objects that have one of these as a child."""
        from flwr.supercore.state.schema.objectstore_models import ObjectChild

        return self._where(ObjectChild.parent_id, ObjectChild.child_id, names)

    def requests(self, names: set[str]) -> bool:
        """Return whether one of these is a request of the server."""
        from flwr.supercore.state.schema.linkstate_models import MessageIns

        return bool(self._where(MessageIns.message_id, MessageIns.message_id, names))

    def root(self, session: str) -> str | None:
        """Return the message that is uploaded in this session of Flower's."""
        from flwr.supercore.state.schema.corestate_models import ObjectPushSessionRoot as Root

        return next(iter(self._where(Root.root_object_id, Root.session_id, {session})), None)

    def children(self, names: set[str]) -> set[str]:
        """Return the children of all these."""
        from flwr.supercore.state.schema.objectstore_models import ObjectChild

        return self._where(ObjectChild.child_id, ObjectChild.parent_id, names)

    def _where(self, wanted: Any, column: Any, names: set[str]) -> set[str]:
        from sqlalchemy import select

        with self.state.session() as session:
            return {one for some in _portions(names) for one in session.scalars(select(wanted).where(column.in_(some)))}


def _portions(names: Iterable[str]) -> Iterator[list[str]]:
    left = iter(names)
    while some := list(islice(left, SOME)):
        yield some
