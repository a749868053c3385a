"""Announced replies that the SuperLink refuses before it stores anything; :mod:`engines.guarded` says why."""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.exc import IntegrityError

from . import instead
from . import ledger as ledgers
from .replies import Later, Refusals, Refused, places, tell, wrong

#: Message, table of records, record, array, chunk: Flower's messages have no more levels.
DEPTH = 5
NAME = re.compile(r"[0-9a-f]{64}")
#: Name -> names of its children, None for an object that is not stored.
Stored = Callable[[str], "frozenset[str] | None"]


def _nothing(name: str) -> None:
    """Tell that nothing is stored."""


def fault(tree: Any, most: int, stored: Stored = _nothing) -> tuple[int, str] | None:
    """Return HTTP status and reason if the announced `tree` must be refused, else None.

    Equal names must have equal children, in the tree and in the store. Then what Flower builds from its lists has
    exactly the places that were announced, and an object cannot be its own descendant.

    Parameters
    ----------
    tree : ObjectTree
        As announced.
    most : int
        Most places in the tree.
    stored : callable
        Tells what the store has.
    """
    found: dict[str, frozenset[str]] = {}
    level, seen = [tree], 1
    for _ in range(DEPTH):
        below: list[Any] = []
        for node in level:
            seen += len(node.children)
            if seen > most:
                return 413, f"more than {most} objects"
            name, children = node.object_id, frozenset(child.object_id for child in node.children)
            if len(children) != len(node.children):
                return 400, "an object names a child twice"
            if not NAME.fullmatch(name):
                return 400, "an object whose name is no SHA-256"
            before = stored(name)
            if found.setdefault(name, children) != children or (before is not None and before != children):
                return 400, "one object is announced with different children"
            below += node.children
        level = below
        if not level:
            return None
    return 400, f"objects nested more than {DEPTH} deep"


def _contents(store: Any) -> Stored:
    """Return what tells the children of a stored object.

    Two announcements that are harmless one by one may grow together in the store in memory. Flower's SQL store itself
    refuses a known object with other children.
    """
    from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore

    def children(name: str) -> frozenset[str] | None:
        entry = store.store.get(name)
        return None if entry is None else frozenset(entry.child_object_ids)

    return children if isinstance(store, InMemoryObjectStore) else _nothing


def limited(
    push_messages: Callable[..., Any], most: int, ledger: ledgers.Ledger, refused: Refusals
) -> Callable[..., Any]:
    """Return Flower's handler of announced replies, which refuses what is no reply or a tree that has a :func:`fault`.

    A refusal is logged with the node, whose key the SuperLink has checked by then, and counted; if the reply is to a
    request to this node, the server gets an error in its place (:mod:`instead`). Announcements are stored one after the
    other: each locks the database, and of several at once some would end with an error.

    Parameters
    ----------
    push_messages : callable
        Flower's.
    most : int
        Most objects of a reply.
    ledger : Ledger
        What the devices have announced and stored.
    refused : Refusals
        Gets every refusal.
    """
    turn = threading.Lock()

    def check(request: Any, state: Any) -> None:
        if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
            raise Refused(400, "not one message with one tree")
        # Flower takes a message that it has already once more, and stores the tree that comes with it, whatever it is.
        if request.messages_list[0].metadata.message_id != request.message_object_trees[0].object_id:
            raise Refused(400, "message and tree have different names")
        if why := wrong(request, state, time.time()):
            raise Refused(400, why)
        if found := fault(request.message_object_trees[0], most):
            raise Refused(*found)

    def store(request: Any, state: Any) -> Any:
        with in_turn():
            if found := fault(request.message_object_trees[0], most, _contents(state.object_store)):
                raise Refused(*found)
            try:
                answer = push_messages(request=request, state=state)
            except (ValueError, ArithmeticError, IntegrityError) as error:
                raise Refused(400, f"Flower cannot store it, {type(error).__name__}: {str(error)[:120]!r}") from error
            name = request.messages_list[0].metadata.reply_to_message_id
            if not answer.objects_to_push and instead.waits_for(state, name, request.node.node_id, time.time()):
                raise Refused(400, "Flower does not store it; its times do not fit its request")
            return answer

    @contextmanager
    def in_turn() -> Iterator[None]:
        if not turn.acquire(timeout=ledgers.QUEUE_S):
            raise Later("other replies are being announced")
        try:
            yield
        finally:
            turn.release()

    def enter(request: Any, state: Any) -> Any:
        check(request, state)
        [tree], node, wanted = request.message_object_trees, request.node.node_id, []
        ledger.enter(node, tree.object_id, places(tree), state)
        try:
            answer = store(request, state)
            wanted = list(answer.objects_to_push)
        finally:
            ledger.left(node, tree.object_id, request.messages_list[0].metadata.run_id, wanted, state)
        return answer

    @functools.wraps(push_messages)
    def handler(request: Any, state: Any) -> Any:
        node = request.node.node_id
        try:
            try:
                return enter(request, state)
            except Refused as refusal:
                refused(node, "a reply", refusal.why)
                [first, *_] = [one.metadata.reply_to_message_id for one in request.messages_list] or [""]
                if instead.waits_for(state, first, node, time.time()):
                    with in_turn():
                        tell(instead.report, state, first, node, refusal.why)
                raise
        except Later as later:
            refused(node, "a reply for now", later.why)
            raise

    return handler
