"""Whose call the SuperLink answers next, and how much of its time one caller gets while others work.

The SuperLink answers some fifty calls a second where its processor is shared. Answered in the order in which they come,
the calls of one node that asks without end leave the others what is over. Here at most :data:`PLACES` calls are in
Flower's application at a time. Each caller has a *balance* of seconds: what a call took is taken off, and a caller gets
back what its part of each second is (:meth:`Fair.part`). The caller with the largest balance is next. Who has used up
half of :data:`BURST_S` is *greedy*: it has one call in the application at a time, which begins when no other is there,
or has waited for a while; who has used up all waits until there is something again. On a SuperLink where the others do
next to nothing, all this does not hold: one caller gets everything.

Everything here happens in the thread of the web server's event loop; :mod:`door` calls it before Flower sees a request.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from logging import WARNING
from typing import Any, TypeVar

from flwr.common.logger import log

from .replies import Later

#: Calls that are in Flower's application at the same time, large objects, and calls of strangers among the former.
#: Python does little more with more threads. A large object waits for its turn at the database (:mod:`turns`).
PLACES, LARGE_PLACES, STRANGERS = 4, 8, 2
#: Calls of one node that are here, waiting ones too, and of one that has used up half of its balance. A SuperNode makes
#: two for the objects of a message, one for work and one as its heartbeat.
MOST, FEW = 8, 4
#: The same for the strangers of one address, and for all of them: many devices behind a router may join at once.
MOST_STRANGERS, ALL_STRANGERS = 64, 256
#: Seconds of the SuperLink's time that a caller may use in one go: some 300 small calls.
BURST_S = 3.0
#: Seconds until half of the time that was used is forgotten, where it is asked how much others use.
HALF_S = 10.0
#: A caller counts for the others' parts for so many seconds after its last call.
ACTIVE_S = 10.0
#: The part of the time that the others use on a quiet SuperLink, at most.
QUIET = 0.05
#: The part that a caller gets together with what the others use.
TOGETHER = 0.5
#: What a call that is sent away costs its caller, in seconds; some times what it takes. Whoever makes a hundred such
#: calls a second has none answered until it stops. A SuperNode makes none.
SENT_S = 0.002
#: Seconds after which a greedy caller's call begins beside others.
PATIENT_S = 0.25
#: Longest wait for a place, in seconds. A SuperNode waits for 30 s for an answer.
QUEUE_S = 15.0
#: Seconds between two lines of the log on one caller.
TOLD_S = 60.0
#: Nodes, and addresses of strangers, that are remembered; those that have called longest ago are forgotten first.
REMEMBERED = 10_000

K = TypeVar("K", bound=Hashable)


@dataclass(eq=False)
class Caller:
    """A node, or the strangers of one address.

    Attributes
    ----------
    name : str
        For the log.
    known : bool
        Whether it is a node.
    balance, at : float
        Seconds of the SuperLink's time that it may use, as of `at`.
    used, used_at : float
        Seconds that it has used, as of `used_at`, fading.
    called : float
        When it called last.
    here, inside : int
        Its calls that are here, and those of them that are in Flower's application.
    away : dict
        Path -> until when calls to it are sent away, since the node's share of them is used up.
    sent, told : int, float
        Calls sent away since the log said so, at `told`.
    """

    name: str
    known: bool
    balance: float = BURST_S
    at: float = 0.0
    used: float = 0.0
    used_at: float = 0.0
    called: float = 0.0
    here: int = 0
    inside: int = 0
    away: dict[str, float] = field(default_factory=dict)
    sent: int = 0
    told: float = -math.inf


@dataclass(eq=False)
class Call:
    """A call that is here.

    Attributes
    ----------
    caller : Caller
        Who pays for it.
    path : str
        What is asked.
    large : bool
        Whether it brings a large object.
    node : int or None
        The node that makes it, once Flower has checked its signature and we have found the node.
    away : float
        Seconds for which such calls of this node are to be sent away from now on.
    waited : float
        Seconds for which it has waited for its turn at the database.
    admitted : callable
        Is called when it gets its place.
    came : float
        Since when it waits for its place.
    began : float or None
        When it got its place, in seconds of the SuperLink's time (of the clock for a large one).
    """

    caller: Caller
    path: str
    large: bool = False
    node: int | None = None
    away: float = 0.0
    waited: float = 0.0
    admitted: Callable[[], object] = bool
    came: float = 0.0
    began: float | None = None


#: The call that this thread or task works on.
current: ContextVar[Call | None] = ContextVar("fedcross_call", default=None)
#: Stands for a call that the door answers itself: it gets no line in the web server's log.
AWAY = Call(Caller("nobody", known=False), "")


class Fair:
    """Places in Flower's application.

    Parameters
    ----------
    clock : callable
        Tells the time in seconds.
    later : callable, optional
        Calls a function after so many seconds and returns what can be cancelled; an event loop's ``call_later``.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], Any] | None = None,
    ) -> None:
        self.clock, self.later = clock, later
        self._nodes: dict[int, Caller] = {}
        self._addresses: dict[str, Caller] = {}
        self._queue: list[Call] = []
        self._inside = self._large = self._strangers = self._strangers_here = 0
        self._worked, self._since = 0.0, clock()
        self._all = Caller("all nodes", known=True, used_at=clock())
        self._active, self._counted = 0, -math.inf
        self._timer: Any = None

    def node(self, number: int) -> Caller:
        """Return a node as a caller."""
        return self._find(self._nodes, number, f"node {number}", known=True)

    def strangers(self, address: str) -> Caller:
        """Return those who call from `address` with keys that were not seen there."""
        return self._find(self._addresses, address, f"the unknown keys at {address}", known=False)

    def _find(self, among: dict[K, Caller], key: K, name: str, known: bool) -> Caller:
        if key not in among:
            if len(among) >= REMEMBERED:  # only those without a call here can be forgotten
                idle = sorted((one.called, number) for number, one in enumerate(among.values()) if not one.here)
                keys = list(among)
                for _, number in idle[: REMEMBERED // 10]:
                    del among[keys[number]]
            now = self.clock()
            among[key] = Caller(name, known, at=now, used_at=now, called=now)
        return among[key]

    def part(self, caller: Caller, now: float) -> float:
        """Return the part of the SuperLink's time that `caller` gets back now: 1 if the others use next to none.

        Else an equal part among all who have called lately; more, as long as it and the others need half of the time.
        """
        others = _used(self._all, now) - (_used(caller, now) if caller.known else 0.0)
        rate = max(0.0, others) * math.log(2) / HALF_S
        if rate < QUIET:
            return 1.0
        if now - self._counted >= 1:
            self._active = sum(now - one.called < ACTIVE_S for one in self._nodes.values())
            self._counted = now
        own = caller.known and now - caller.called < ACTIVE_S
        others_now = max(0, self._active - own)  # the count may be older than this caller's last call
        return max(1 / (1 + others_now), TOGETHER - rate)

    def come(self, caller: Caller, path: str) -> Call:
        """Let a call come in, to wait for its body and for a place.

        Raises
        ------
        Later
            If too many calls of this caller are here, or its share of such calls is used up.
        """
        now = self.clock()
        self._fill(caller, now)
        caller.called = now
        if caller.away and now < caller.away.get(path, 0.0):
            raise self._sent(caller, now, "it has used up its share of them")
        if caller.known:
            most = FEW if self._greedy(caller, now) else MOST
        else:
            most = MOST_STRANGERS if self._strangers_here < ALL_STRANGERS else 0
        if caller.here >= most:
            raise self._sent(caller, now, f"{caller.here} of its calls are here already")
        caller.here += 1
        self._strangers_here += not caller.known
        return Call(caller, path)

    def wait(self, call: Call) -> None:
        """Let a call, whose body is here, wait for its place; `admitted` may be called at once."""
        call.came = self.clock()
        self._queue.append(call)
        self.admit()

    def leave(self, call: Call) -> None:
        """Take a call's place back, and what it took off its caller's balance; one that waits gives up."""
        now, caller = self.clock(), call.caller
        if call.began is None:
            if call in self._queue:
                self._queue.remove(call)
            return
        took = now - call.began - call.waited if call.large else self._work(now) - call.began
        call.began = None
        if call.large:
            took, self._large = max(0.0, took) / (1 + self._inside), self._large - 1
        else:
            self._inside -= 1
        self._strangers -= not caller.known
        caller.inside -= 1
        self.charge(caller, took)
        self.admit()

    def go(self, call: Call) -> None:
        """Let a call, which has left its place, go."""
        self.leave(call)
        call.caller.here -= 1
        self._strangers_here -= not call.caller.known

    def move(self, call: Call, caller: Caller) -> None:
        """Make `caller` pay for a call that is inside: it has turned out who makes it."""
        old, call.caller = call.caller, caller
        old.here, caller.here = old.here - 1, caller.here + 1
        old.inside, caller.inside = old.inside - 1, caller.inside + 1
        change = old.known - caller.known
        self._strangers, self._strangers_here = self._strangers + change, self._strangers_here + change

    def charge(self, caller: Caller, seconds: float) -> None:
        """Take `seconds` off a caller's balance."""
        now = self.clock()
        self._fill(caller, now)
        caller.balance = max(-BURST_S, caller.balance - seconds)
        for one in (caller, self._all) if caller.known else (caller,):
            one.used, one.used_at = _used(one, now) + seconds, now

    def admit(self) -> None:
        """Give free places to those who wait, and set the clock for those who must wait until they have a balance."""
        now = self.clock()
        while True:
            ready = [call for call in self._queue if self._may(call, now)]
            if not ready:
                break
            call = max(ready, key=lambda one: (one.caller.known, one.caller.balance))
            self._queue.remove(call)
            self._enter(call, now)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        short = [call.caller for call in self._queue if call.caller.balance <= 0]
        if short and self.later is not None:
            seconds = min((0.001 - one.balance) / self.part(one, now) for one in short)
            self._timer = self.later(seconds, self.admit)

    def _may(self, call: Call, now: float) -> bool:
        """Return whether a place is free for a call, and its caller may have it."""
        caller = call.caller
        if (self._large >= LARGE_PLACES) if call.large else (self._inside >= PLACES):
            return False
        if not caller.known and self._strangers >= STRANGERS:
            return False
        self._fill(caller, now)
        if not self._greedy(caller, now):
            return True
        late = call.large or not self._inside or now - call.came >= PATIENT_S
        return caller.balance > 0 and not caller.inside and late

    def _enter(self, call: Call, now: float) -> None:
        call.began = now if call.large else self._work(now)
        if call.large:
            self._large += 1
        else:
            self._inside += 1
        self._strangers += not call.caller.known
        call.caller.inside += 1
        call.admitted()

    def _greedy(self, caller: Caller, now: float) -> bool:
        return caller.balance < BURST_S / 2 and self.part(caller, now) < 1

    def _fill(self, caller: Caller, now: float) -> None:
        if now > caller.at:
            if caller.balance < BURST_S:
                caller.balance = min(BURST_S, caller.balance + self.part(caller, now) * (now - caller.at))
            caller.at = now

    def _work(self, now: float) -> float:
        """Return the time for which the SuperLink has worked: of four calls at a time, each gets a quarter."""
        self._worked += (now - self._since) / max(1, self._inside)
        self._since = now
        return self._worked

    def _sent(self, caller: Caller, now: float, why: str) -> Later:
        """Count a call that is sent away, say so in the log once a minute, and return the answer."""
        self.charge(caller, SENT_S)
        caller.sent += 1
        if now - caller.told >= TOLD_S:
            more = f"{caller.sent} since the last line on it"
            log(WARNING, "fedcross: sent away calls of %s: %s (%s)", caller.name, why, more)
            caller.told, caller.sent = now, 0
        return Later(f"this device calls too often, {why}")


def _used(caller: Caller, now: float) -> float:
    return caller.used * math.exp2((caller.used_at - now) / HALF_S)
