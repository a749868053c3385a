"""Whose word counts about an object: an announcement says which children it has, its content decides.

Objects are named by the digest of their content, and Flower keeps the children of a name once, as they were announced
first. So one device could announce a name that the server, or another device, uses later, with other children than its
content has: a database then refuses whoever announces the right ones, for ever, and the store in memory silently keeps
the wrong ones. Here an announcement binds nobody else:

- What the server announces counts, always: it replaces what a device said, and no device replaces it.
- A content that is stored counts: an announcement that differs from it is refused.
- Of two devices that differ the later one counts until the content comes, unless the earlier one announced it less than
  :data:`ledger.HOLD_S` ago: then the later one asks again. So neither is held up for longer than that.
- A content that comes is compared with what its sender announced, and all who announced it otherwise are refused: their
  replies end, the server is told (:mod:`instead`), the log names them.

The server gets the tree of a reply as its names only (:func:`named`): what a device says of an object that another
reply has too cannot make that reply grow.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from logging import WARNING
from typing import Any

from flwr.common.logger import log
from flwr.supercore.inflatable.inflatable_object import get_object_children_ids_from_object_content

from . import instead
from .ledger import Ledger
from .replies import Refusals, Refused, tell
from .rows import Rows, rows_of

LIE = "an object is announced with other children than its content has"


def claims_of(trees: Iterable[Any]) -> dict[str, Any]:
    """Return name -> tree of all objects in announced trees, children before their parents."""
    found: dict[str, Any] = {}

    def add(node: Any) -> None:
        if node.object_id not in found:
            for child in node.children:
                add(child)
            found[node.object_id] = node

    for tree in trees:
        add(tree)
    return found


def said(node: Any) -> frozenset[str]:
    """Return the children that an announced tree says its topmost object has."""
    return frozenset(child.object_id for child in node.children)


def real(content: bytes) -> frozenset[str] | None:
    """Return the children that an object's content names, None if it cannot be read."""
    try:
        return frozenset(get_object_children_ids_from_object_content(content))
    except ValueError:
        return None


def settle(state: Any, trees: Iterable[Any], run: int, node: int | None, ledger: Ledger) -> list[str]:
    """Let the store have the children that count, before Flower compares them; return what was in dispute.

    Parameters
    ----------
    state : LinkState
        Flower's.
    trees : iterable of ObjectTree
        As announced. Those of a device have been found without fault.
    run : int
        The run that they are for.
    node : int or None
        Who announces them; None: the server.
    ledger : Ledger
        What the devices have announced.

    Raises
    ------
    Refused
        If a device's word does not count.
    Later
        If it may count in a moment.
    """
    told, rows = claims_of(trees), rows_of(state)

    def odd() -> list[str]:
        known = rows.known(told)
        return [name for name, tree in told.items() if name in known and known[name].children != said(tree)]

    if not odd():
        return []
    with rows.turn():
        changed = [name for name in odd() if _counts(rows, name, said(told[name]), node, ledger)]
        for name in changed:
            for child in told[name].children:
                rows.store.preregister(run, child)
            if node is not None:
                rows.pin(run, name)  # the other device may be sending them
            rows.relink(run, name, said(told[name]))
    ledger.dispute(changed)
    return changed


def _counts(rows: Rows, name: str, claim: frozenset[str], node: int | None, ledger: Ledger) -> bool:
    """Return whether `claim` replaces the children that the store has; raise if a device's does not."""
    if content := rows.store.get(name):
        right = real(content) == claim
        if node is not None and not right:
            raise Refused(400, LIE)
        return right
    if node is None:
        return True
    if rows.servers(name):
        raise Refused(400, "an object of the server is announced with other children")
    ledger.may_claim(node, name, claim)
    return True


def end_liars(state: Any, name: str, children: frozenset[str], ledger: Ledger, refused: Refusals) -> None:
    """End the unfinished replies that were announced with other `children` of the object; tell the server and the log.

    Raises
    ------
    Later
        If the database is busy.
    """
    for node, reply in ledger.liars(name, children):
        tell(instead.replace, state, reply, node, LIE)
        ledger.give_up(node, reply)
        refused(node, "a reply", f"{LIE} ({name[:16]}...)")
    ledger.agree(name)


def arrived(state: Any, request: Any, ledger: Ledger, refused: Refusals) -> None:
    """Let the content of an object that a device pushes decide, before Flower stores it.

    Raises
    ------
    Refused
        If the device itself has announced the object with other children.
    Later
        If the database is busy.
    """
    node, name, content = request.node.node_id, request.object_id, request.object_content
    rows, children, own = rows_of(state), real(content), ledger.claim(node, name)
    known = rows.known([name]).get(name)
    if known is None or known.stored or children is None:
        return  # Flower refuses it, or has it
    agreed = known.children == children and own in (None, children) and not ledger.disputed(name)
    if agreed or hashlib.sha256(content).hexdigest() != name:
        return
    with rows.turn():
        if own not in (None, children) or not children <= rows.known(children).keys():
            raise Refused(400, LIE, "This object")
        if known.children != children:
            rows.relink(request.run_id, name, children)
    rows.unpin(name)
    end_liars(state, name, children, ledger, refused)


def asserted(push_messages: Callable[..., Any], ledger: Ledger, refused: Refusals) -> Callable[..., Any]:
    """Return Flower's handler of the server's requests, after which devices' announcements do not stand in its way."""

    @functools.wraps(push_messages)
    def handler(request: Any, state: Any, task: Any) -> Any:
        trees = request.message_object_trees
        for name in settle(state, trees, task.run_id, None, ledger):
            log(WARNING, "fedcross: a device has announced object %s of the server with other children", name)
        for name, tree in claims_of(trees).items():
            if ledger.disputed(name):
                end_liars(state, name, said(tree), ledger, refused)
        answer = push_messages(request, state, task)
        settle(state, trees, task.run_id, None, ledger)  # a device may have been in between
        return answer

    return handler


class _Instead:
    """An object of Flower's with other attributes."""

    def __init__(self, inner: Any, **others: Any) -> None:
        self.__dict__.update(others, _inner=inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def named(pull_messages: Callable[..., Any]) -> Callable[..., Any]:
    """Return Flower's handler of the server's question for replies, which gives each tree as its names only."""

    @functools.wraps(pull_messages)
    def handler(request: Any, state: Any, task: Any) -> Any:
        store = _Instead(state.object_store, get_object_tree=rows_of(state).below)
        return pull_messages(request, _Instead(state, object_store=store), task)

    return handler
