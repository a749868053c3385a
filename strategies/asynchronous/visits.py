"""The loop of asynchronous methods: every free slot goes out at once, and no slot waits for another one.

At most K = ``clients_per_round`` visits are under way, one for each slot. When a visit ends, its upload is handed to
the method, and its slot goes to another client. Rounds remain as a unit of counting: a round is K visits, accepted or
lost, so that evaluation, checkpoints and reports are those of every method. A client that is far ahead of the others
waits (:mod:`strategies.asynchronous.lead`): a slot without another client waits with it, until some visit ends.

On a virtual clock, visits are handled in the order of virtual time (ties by slot), whatever the order in which this
machine finishes them. Visits that end at the same virtual time are one *group*: the method gets all their uploads at
once, and all their slots go out together. If all visits take equally long, a group is a whole round.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.randomness import stream
from fedcross.strategies.asynchronous.asking import Asking
from fedcross.strategies.asynchronous.lead import Lead
from fedcross.strategies.asynchronous.open_visit import NOBODY, OpenVisit
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.client_faults import end_if_common
from fedcross.strategies.round.clock import RealClock, ReplayClock
from fedcross.strategies.round.federation import RoundReport, State
from fedcross.strategies.round.trail import never_asked
from fedcross.strategies.wire.protocol import Payload, Round
from fedcross.strategies.wire.records import Arrays


class AsyncMethod(Asking[P]):
    """Base of asynchronous methods.

    A method defines :meth:`payload` (what a slot sends), ``aggregate`` (what becomes of the uploads of a group) and,
    if the client is not drawn uniformly among idle ones, :meth:`choose`. A client whose visit was lost is not asked
    again before somebody's upload has been accepted, unless nobody else is idle and nothing is under way. A client that
    is further ahead than ``federation.lead`` allows is not asked while anything is under way.

    ``clock`` is the real one unless set before :meth:`begin`.

    Attributes
    ----------
    open : dict of int to OpenVisit
        Slot -> its visit that is under way.
    now : float
        Time of the last event, in seconds of the clock.
    finished, accepted_visits : int
        Visits that have ended, and those among them with an accepted upload.
    lead : Lead
        Visits of each client.
    """

    interchangeable = True
    asynchronous = True

    def begin(self, arrays: Arrays, parameters: Collection[str] | None = None) -> None:
        """Start from the initial model; no visit is under way."""
        self._clock = self.clock or RealClock()
        self.open: dict[int, OpenVisit] = {}
        self.now, self.dispatched, self.finished, self.accepted_visits = 0.0, 0, 0, 0
        #: Slots from the least to the most recently trained one.
        self.queue = list(range(self.slots))
        self._last_asked: dict[int, tuple[int, int]] = {}  # client -> round and repeat of its last visit
        self.lead = Lead(self.federation.lead)
        self._resting: set[int] = set()  # clients whose visit was lost since the last accepted upload
        self._arrived: deque[OpenVisit] = deque()  # ended visits that are still to be handled, on the real clock
        self._logged: deque[tuple[int, int, float | None]] | None = None  # the log's order, before a crash
        super().begin(arrays, parameters)

    # ---- what a method defines ----------------------------------------------------------------------------------

    def prepare(self, slot: int) -> None:
        """Fix what `slot` sends in the visit that starts now; called once for each visit."""

    def choose(self, number: int, group: int, slots: Sequence[int], idle: Sequence[int]) -> list[int]:
        """Return the clients for `slots`, among `idle` ones (sorted); at round `number`'s `group`-th dispatch."""
        keys = (number,) if group == 0 else (number, group)
        drawn = stream(self.federation.seed, "sample", *keys).choice(len(idle), size=len(slots), replace=False)
        return [idle[i] for i in drawn]

    def timed(self, client: int, seconds: float) -> None:
        """Note how long an accepted visit of `client` took."""

    def measure(self, number: int) -> dict[str, float]:
        """Return metrics at the end of round `number`."""
        return {}

    # ---- the round ----------------------------------------------------------------------------------------------

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Any] | None = None) -> RoundReport:
        """Run until `number` times K visits of the run have ended, and return the report of this round's visits."""
        self._begin_round(number, grid)
        if isinstance(self._clock, RealClock):
            self._clock.now(self.now)  # starts it
        if self._logged is None:
            self._logged = deque(self.log.order() if self.log is not None else ())
        began, self._group, self._events, self._losses = self.now, 0, 0, (0.0, 0)
        self._staleness: list[int] = []
        self._local: list[float] = []
        self._asked_now: set[int] = set()
        self._faults = {}
        while self.finished < number * self.slots:
            started = time.perf_counter()
            self._fill(number)
            self._ask_all(grid, config or {})
            group = self._next_real(grid) if self._clock.real else self._next_virtual(grid, config or {})
            self._report.seconds_training += time.perf_counter() - started
            self._handle(number, group)
        self._end_round(number, began)
        return self._report

    def _begin_round(self, number: int, grid: Grid) -> tuple[int, ...]:
        """Wait until enough clients are connected; return them all."""
        self._report = RoundReport(number)
        rules = self.federation
        self._available = self.nodes.wait_for(grid, rules.min_clients or rules.clients_per_round, rules.wait_s)
        if self.log is not None:
            before = self.log.available(number)
            if before is None:
                self.log.draw(number, self._available)
            else:
                self._available = before
        return tuple(self._available)

    def _end_round(self, number: int, began: float) -> None:
        report, (loss, examples) = self._report, self._losses
        report.exchanges = 1
        if examples:
            report.train_loss = loss / examples
        if self._local:
            report.metrics["local_accuracy"] = sum(self._local) / len(self._local)
        if self._staleness:
            report.metrics["staleness_mean"] = sum(self._staleness) / len(self._staleness)
            report.metrics["staleness_max"] = float(max(self._staleness))
        report.metrics["virtual_seconds"] = self.now - began
        report.metrics |= self.measure(number)
        self.lead.end_round(number, len(self._available))
        if self._faults and not self._staleness:
            connected = len(self._available)
            end_if_common(self._faults, self._asked_now, number, connected, heard=self._heard, said=self._said)

    # ---- dispatch -----------------------------------------------------------------------------------------------

    def _fill(self, number: int) -> None:
        """Give free slots, the least recently trained first, to idle clients."""
        free = [slot for slot in self.queue if slot not in self.open]
        if isinstance(self._clock, ReplayClock):
            self._repeat(self._clock, free)
            return
        idle = self._idle()
        slots = sorted(free[: len(idle)])
        if not slots:
            return
        chosen = self.choose(number, self._group, slots, idle)
        self._group += 1
        for slot, client in zip(slots, chosen):
            self._dispatch(slot, client)

    def _repeat(self, clock: ReplayClock, free: Sequence[int]) -> None:
        """Send the visits of an earlier run out that had begun by now.

        One that had not ended with that run is not in its record. It goes out to nobody, in a slot that the record does
        not need any more: a client that is drawn for it could be one whose next visit the record has.
        """
        planned = clock.due(self.dispatched, self.now, len(free))
        told = [slot for slot, _ in planned if slot is not None]
        if not set(told) <= {*free}:
            raise self._another()
        left = [slot for part in (free[: len(planned)], free[len(planned) :]) for slot in sorted({*part} - {*told})]
        for slot, client in planned:
            if slot is None:
                kept = clock.kept(self.dispatched)
                slot = next((one for one in left if one not in kept), None)
                if slot is None:
                    break
                left.remove(slot)
            if client is None:
                self._hold(slot)
            else:
                self._dispatch(slot, client)
        if not self.open:
            raise self._another()

    def _another(self) -> ConfigError:
        return ConfigError(
            f"clock.events: visit {self.dispatched} of the record cannot begin here after {self.now:.5g} s in its "
            "slot. So this is another run, or lines are missing: give method, seed, clients and slots of the record."
        )

    def _idle(self) -> list[int]:
        busy = {visit.client for visit in self.open.values()}
        idle = [client for client in self._available if client not in busy]
        willing = [client for client in idle if client not in self._resting]
        if not self.open:  # nobody is there to wait for
            return willing or idle
        return self.lead.behind(willing, [client for client in self._available if client in self._last_asked])

    def _dispatch(self, slot: int, client: int) -> None:
        index = self.dispatched
        number = 1 + index // self.slots
        if client not in self._last_asked:
            self.lead.enter(client, [one for one in self._available if one in self._last_asked])
        before, repeat = self._last_asked.get(client, (0, 0))
        repeat = repeat + 1 if before == number else 0
        self.dispatched += 1
        self._last_asked[client] = number, repeat
        self.prepare(slot)
        current = Round(number, repeat, (client,), self.federation.seed)
        payload = self.payload(slot, client)
        nbytes = self._both_ways(payload, payload.arrays)
        finish, trained = self._clock.plan(index, client, self._visit(current), self.now, nbytes)
        self.open[slot] = OpenVisit(
            index, slot, client, number, repeat, self.now, finish, trained, self.accepted_visits
        )

    def _hold(self, slot: int) -> None:
        """Give `slot` a visit that never ends, of nobody."""
        index, number = self.dispatched, 1 + self.dispatched // self.slots
        self.dispatched += 1
        self.prepare(slot)
        self.open[slot] = OpenVisit(index, slot, NOBODY, number, 0, self.now, math.inf, False, self.accepted_visits)

    def _visit(self, current: Round) -> int:
        """Return the number under which a client stores its state; it grows with every visit of the client."""
        return (current.number - 1) * self.slots + current.exchange + 1

    # ---- what becomes of a group --------------------------------------------------------------------------------

    def _handle(self, number: int, group: Sequence[OpenVisit]) -> None:
        """Hand the uploads of `group` to the method and free its slots."""
        started, report = time.perf_counter(), self._report
        self.now = group[0].finish
        uploads = [visit.upload for visit in group if visit.upload is not None]
        for visit in group:
            self._count(visit)
            self._record(number, visit)
            self.lead.ended(visit.client, visit.upload is not None)
            del self.open[visit.slot]
        current = Round(number, self._events, tuple(visit.client for visit in group), self.federation.seed)
        if self.observer is not None:
            self.observer(current, uploads)
        if self.on_visit is not None:
            for visit in group:
                self.on_visit(visit.line(number, self._events, self.accepted_visits))
        for visit in group:
            if visit.upload is not None:
                self._staleness.append(self.accepted_visits - visit.seen)
                self.accepted[visit.client] = self._visit(Round(visit.round, visit.repeat, (), 0))
                self.timed(visit.client, visit.finish - visit.start)
        report.metrics.update(self.aggregate(current, uploads))
        self._events += 1
        self.finished += len(group)
        self.accepted_visits += len(uploads)
        trained = {upload.slot for upload in uploads}
        self.queue.sort(key=lambda slot: slot in trained)  # stable: the longest waiting slots stay in front
        lost = {visit.client for visit in group if visit.upload is None}
        self._resting = set() if uploads else self._resting | lost
        report.seconds_aggregation += time.perf_counter() - started

    def _record(self, number: int, visit: OpenVisit) -> None:
        """Hand over how the requests of `visit` ended, in round `number`; no reply to them is used any more."""
        if visit.exchange is not None:
            if (trail := visit.exchange.inbox.trail) is not None:
                trail.place = {"round": number, "visit": visit.index}
            self._ended_requests(visit.exchange)
            visit.exchange.forget()
        elif self.on_ended is not None:
            self.on_ended({"round": number, "visit": visit.index, **never_asked(visit.slot, visit.client)})

    def _count(self, visit: OpenVisit) -> None:
        """Count what `visit` cost and brought."""
        report, upload = self._report, visit.upload
        if visit.exchange is not None:
            report.clients += visit.exchange.counts["requests"]
            report.bytes_down += visit.exchange.counts["bytes"]
        else:  # beyond the clock's deadline: nobody was asked, and yet a client was lost
            report.clients += 1
        report.rejected.update(visit.rejected)
        report.dropped += upload is None
        if upload is None:
            return
        self._heard = True
        report.bytes_up += upload.nbytes
        if "local-accuracy" in upload.metrics and self.local_due(visit.round):
            self._local.append(upload.metrics["local-accuracy"])
        if "train-loss" in upload.metrics:
            loss, examples = self._losses
            self._losses = (
                loss + upload.metrics["train-loss"] * upload.num_examples,
                examples + upload.num_examples,
            )

    # ---- the rest of a method's interface -----------------------------------------------------------------------

    def dispatch(self, current: Round) -> list[Payload]:
        """Return what the free slots, the least recently trained first, would send to ``current.clients``."""
        free = [slot for slot in self.queue if slot not in self.open][: len(current.clients)]
        return [self.payload(slot, client) for slot, client in zip(sorted(free), current.clients)]

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Refuse: Flower's own loop collects the replies of a whole round before it hands them over."""
        raise FederationError(f"{type(self).__name__} does not wait for whole rounds: call start(grid, arrays, ...).")

    def checkpointed(self) -> None:
        """Write replies that have arrived but not been used into the log, which a checkpoint has just emptied."""
        if self.log is None:
            return
        early = [*self._arrived, *(v for v in self.open.values() if v.upload is not None and v not in self._arrived)]
        for visit in early:
            if visit.upload is not None:
                self.log.accept(self._place(visit), visit.upload)
            else:
                self.log.end(self._place(visit), visit.finish)

    def checkpoint(self) -> State:
        """Return the method's state, and the visits that are under way."""
        state = super().checkpoint()
        loop = {
            "now": self.now,
            "dispatched": self.dispatched,
            "finished": self.finished,
            "accepted": self.accepted_visits,
            "queue": list(self.queue),
            "resting": sorted(self._resting),
            "lead": self.lead.plain(),
            "last_asked": {str(client): list(pair) for client, pair in sorted(self._last_asked.items())},
            "open": [self.open[slot].plain() for slot in sorted(self.open)],
        }
        return State(state.arrays, {**state.values, "_visits": loop})

    def resume(self, state: State) -> None:
        """Continue from what :meth:`checkpoint` returned; visits under way are sent again."""
        values = dict(state.values)
        loop = values.pop("_visits")
        self.now, self.dispatched = float(loop["now"]), int(loop["dispatched"])
        self.finished, self.accepted_visits = int(loop["finished"]), int(loop["accepted"])
        self.queue, self._resting = [int(slot) for slot in loop["queue"]], {int(c) for c in loop["resting"]}
        self._last_asked = {int(client): (int(a), int(b)) for client, (a, b) in loop["last_asked"].items()}
        self.lead.restore(loop.get("lead", {}))
        self.open = {int(plain["slot"]): OpenVisit.of(plain) for plain in loop["open"]}
        super().resume(State(state.arrays, values))
