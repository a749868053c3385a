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

from . import claims, instead, over
from . import ledger as ledgers
from .replies import Later, Refusals, Refused, places, tell, wrong
from .rows import DEPTH

NAME = re.compile(r"[0-9a-f]{64}")


def fault(tree: Any, most: int) -> tuple[int, str] | None:
    """Return HTTP status and reason if the announced `tree` must be refused, else None.

    Equal names must have equal children. Then what Flower builds from its lists has exactly the places that were
    announced, and an object cannot be its own descendant. What other announcements say is the matter of :mod:`claims`.

    Parameters
    ----------
    tree : ObjectTree
        As announced.
    most : int
        Most places in the tree.
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
            if found.setdefault(name, children) != children:
                return 400, ledgers.DIFFERENT
            below += node.children
        level = below
        if not level:
            return None
    return 400, f"objects nested more than {DEPTH} deep"


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
        told, node = request.messages_list[0].metadata, request.node.node_id
        name = told.reply_to_message_id
        with in_turn():
            if instead.waits_for(state, name, node, time.time()) or instead.reply_to(state, name) == told.message_id:
                claims.settle(state, request.message_object_trees, told.run_id, node, ledger)
            try:
                answer = push_messages(request=request, state=state)
            except (ValueError, ArithmeticError, IntegrityError) as error:
                raise Refused(400, f"Flower cannot store it, {type(error).__name__}: {str(error)[:120]!r}") from error
            if not answer.objects_to_push:  # nothing is uploaded; Flower keeps a row until the run is over
                state._cleanup_push_session(answer.session_id, cleanup_messages=False)
            if not answer.objects_to_push and instead.waits_for(state, name, node, time.time()):
                over.check(state, told.run_id, node)
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
            said = {name: claims.said(part) for name, part in claims.claims_of([tree]).items()}
            ledger.left(node, tree.object_id, request.messages_list[0].metadata.run_id, wanted, state, said)
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
