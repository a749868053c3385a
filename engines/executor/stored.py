"""Objects of announced replies that the SuperLink refuses before it stores them; :mod:`engines.guarded` says why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from . import claims, instead, over
from .ledger import Ledger
from .replies import Later, Refusals, Refused, tell
from .rows import rows_of


def within(push_object: Callable[..., Any], ledger: Ledger, refused: Refusals) -> Callable[..., Any]:
    """Return Flower's handler of a reply's objects, which refuses what is more than the `ledger` allows.

    It also refuses an object that was announced with other children (:mod:`claims`). The reply cannot be completed any
    more: the server gets an error in its place.
    """

    @functools.wraps(push_object)
    def handler(request: Any, state: Any) -> Any:
        node, name, size = request.node.node_id, request.object_id, len(request.object_content)
        try:
            try:
                ledger.may_store(node, name, size, state)
                claims.arrived(state, request, ledger, refused)
            except Refused as refusal:
                refused(node, "an object", refusal.why)
                if reply := ledger.waits_for(node, name) or rows_of(state).root(request.session_id):
                    tell(instead.replace, state, reply, node, refusal.why)
                    ledger.give_up(node, reply)
                raise
        except Later as later:
            refused(node, "an object for now", later.why)
            raise
        answer = push_object(request=request, state=state)
        if answer.stored:
            ledger.stored(node, name, size)
        else:
            over.check(state, request.run_id, node)
        return answer

    return handler
