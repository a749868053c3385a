"""One global round, the same code for all methods: sampling, requests, validation, accounting, state.

A method derives from :class:`Method` and defines the abstract methods of :class:`strategies.round.contract.Contract`.
It may override those under "what a method may define". ``Method`` is a Flower ``Strategy``, so any Flower ServerApp
can use it (:mod:`strategies.round.flower_hooks`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from logging import WARNING
from typing import Any, cast

import numpy as np
from flwr.app import Message
from flwr.common.logger import log
from flwr.serverapp import Grid

from fedcross.core.errors import ConfigError, UploadError
from fedcross.core.randomness import stream
from fedcross.core.settings import parse
from fedcross.strategies.defence.bands import Bands
from fedcross.strategies.defence.defender import Defender
from fedcross.strategies.defence.rules import Judgement
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.client_faults import Said, configuration_error, end_if_common
from fedcross.strategies.round.clock import Clock, VirtualClock
from fedcross.strategies.round.contract import refuse_taken
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.federation import Federation, ReplyLog, RoundReport, State
from fedcross.strategies.round.flower_names import translate
from fedcross.strategies.round.guard import Inbox
from fedcross.strategies.round.logged import answering
from fedcross.strategies.round.nodes import Nodes
from fedcross.strategies.round.sizes import Sizes
from fedcross.strategies.round.trail import LOST, Tell, Trail
from fedcross.strategies.wire.compression import Compressor
from fedcross.strategies.wire.digest import digest_of
from fedcross.strategies.wire.protocol import Payload, Round, Ticket, Upload, request
from fedcross.strategies.wire.records import Arrays, Spec, nbytes_of, spec_of


class Method(Sizes[P]):
    """Base of all methods.

    Parameters
    ----------
    params : Settings, optional
        The method's own settings; the caller can give them by name instead.
    federation : Federation, optional
        How the server samples clients and waits for them; the caller can give the fields by name instead.
    **values
        Fields of ``Params`` and of :class:`Federation`, or Flower's names (:mod:`strategies.round.flower_names`).
    """

    def __init__(self, params: P | None = None, federation: Federation | None = None, **values: Any) -> None:
        faults: list[str] = []
        values = translate(values, {*self.Params.model_fields, *Federation.model_fields}, faults)
        own = {name: value for name, value in values.items() if name not in Federation.model_fields}
        meeting = {name: value for name, value in values.items() if name in Federation.model_fields}
        checked = params if params is not None else cast("P | None", parse(self.Params, own, "", faults))
        rules = federation if federation is not None else parse(Federation, meeting, "", faults)
        if checked is None or rules is None or faults:
            raise ConfigError([f"{type(self).__name__}: {fault}" for fault in faults])
        self.params, self.federation = checked, rules
        self.nodes = Nodes(self._claim_refused, self._waiting)
        #: Client -> number of requests sent to it, answered or not.
        self.requests: Counter[int] = Counter()
        #: Called with the client before each request to it is sent.
        self.on_request: Callable[[int], None] | None = None
        #: Client -> number of its last accepted visit; its next visit continues from the state it saved then.
        self.accepted: dict[int, int] = {}
        #: The same at the oldest checkpoint that can be resumed: clients keep their states from that visit on.
        self.durable: dict[int, int] | None = None
        self.spec: Spec = {}
        self.parameter_names: tuple[str, ...] = ()
        #: For networks with tied weights: further name in the ``state_dict`` -> name of the array that it shares.
        self.tied: Mapping[str, str] = {}
        #: Digest of the part of the model that is neither trained nor sent (``train.only``); "" without one.
        self.base = ""
        self._available: list[int] = []
        #: Slot -> the model sent to its client in this exchange (views), kept only if defence or compression need it.
        self._sent: dict[int, Arrays] = {}
        self.defender = Defender(self.federation.defence, self.unusual, self.federation.clients_per_round)
        #: Compresses and decompresses models; None if models are sent uncompressed.
        self._compressor: Compressor | None = None
        self._packed = self.federation.packs
        self._faults: dict[int, str] = {}  # client -> its configuration error, in this exchange
        self._digests: dict[tuple[int, ...], tuple[Payload, str]] = {}  # of this exchange's payloads
        self._said: Said = set()  # configuration errors of the rounds without an answer
        self._heard = False  # whether a client has trained since this process began
        self._asked_at = 0.0
        self._round = Round(0, 0, (), self.federation.seed)
        self._report = RoundReport(0)
        #: Keeps accepted replies until a checkpoint covers their round; None to keep none.
        self.log: ReplyLog | None = None
        #: The run's virtual clock, or the clock of an asynchronous method; None for none.
        self.clock: Clock | None = None
        #: Called with the line of ``visits.jsonl`` of each visit of an asynchronous method.
        self.on_visit: Callable[[dict[str, Any]], None] | None = None
        #: Whether clients measure their local accuracy in a round; what they tell in another one is not used.
        self.local_due: Callable[[int], bool] = lambda _: True
        #: Called with a line on each request of an exchange that has ended (:mod:`strategies.round.trail`).
        self.on_ended: Callable[[dict[str, Any]], None] | None = None
        #: Called with the name of an event and its fields, for a structured log and live views.
        self.tell: Tell | None = None
        self._overruled: dict[int, str] = {}  # slot -> why its accepted upload did not count, in this exchange
        self._noticed: dict[int, str] = {}  # slot -> what was seen of a quarantined one
        #: Slots of this exchange whose replies the defence took for none, where it took more of the others.
        self.doubted: list[int] = []
        #: Called with the accepted uploads of every exchange, before they are aggregated.
        self.observer: Callable[[Round, Sequence[Upload]], None] | None = None
        self._taken = frozenset(vars(self))  # names that are not a method's own

    # ---- the round ------------------------------------------------------------------------------------------

    def begin(self, arrays: Arrays, parameters: Collection[str] | None = None) -> None:
        """Start from the initial model `arrays`; `parameters` names its trained entries (None: all float entries).

        Raises
        ------
        ConfigError
            If ``setup`` sets an attribute that this class uses for something else.
        """
        self.spec = spec_of(arrays)
        floats = [name for name, a in arrays.items() if a.dtype.kind == "f"]
        self.parameter_names = tuple(n for n in floats if parameters is None or n in parameters)
        if not self.federation.compression.exact:
            initial = {name: arrays[name] for name in self.parameter_names}
            self._compressor = Compressor(self.federation.compression, initial, self.cut)
        before = {name: getattr(self, name) for name in self._taken}
        self.setup(arrays)
        refuse_taken(self, before)

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Any] | None = None) -> RoundReport:
        """Run one global round with all its exchanges, and return its report.

        Raises
        ------
        FederationError
            If fewer than ``min_clients`` clients are connected after ``wait_s`` seconds.
        """
        clients = self._begin_round(number, grid)
        for index in range(self.exchanges):
            exchange = self._open(Round(number, index, clients, self.federation.seed), grid, config or {})
            exchange.carry_out()
            self._close(exchange)
        return self._report

    @property
    def report(self) -> RoundReport:
        """Costs and metrics of the current round so far, or of the last one between rounds."""
        return self._report

    def _begin_round(self, number: int, grid: Grid) -> tuple[int, ...]:
        """Wait until enough clients are connected, start an empty report, and return the clients of round `number`."""
        self._report = RoundReport(number)
        rules = self.federation
        needed = rules.min_clients or rules.clients_per_round
        sized, self.told = self.plan is not None, None
        if self.log is not None and (before := self.log.available(number)) is not None:
            self.told = self.log.widths(number)
            if sized and self.told is None:  # a log that has no widths: those of now are the best guess
                self.nodes.wait_for(grid, needed, rules.wait_s)
            clients = self.sample(number, before)
            self._available = self.nodes.wait_for(grid, needed, rules.wait_s, clients)
            return clients
        self._available = self.nodes.wait_for(grid, needed, rules.wait_s)
        if self.log is not None:
            self.log.draw(number, self._available, self.nodes.widths() if sized else None)
        return self.sample(number, self._available)

    def _open(self, current: Round, grid: Grid, config: Mapping[str, Any]) -> Exchange:
        """Prepare this exchange, with the uploads that the log already holds; used by both ways to drive a round."""
        self._asked_at = time.perf_counter()
        self._round = current
        self._faults = {}
        if self.tell is not None and current.exchange == 0:
            self.tell("round_started", {"round": current.number, "clients": list(current.clients)})
        report, rules, logged, compressor = self._report, self.federation, self.log, self._compressor
        payloads = self.payloads(current)
        if current.exchange + 1 == self.exchanges:
            self.told = None  # the round is dealt: from here on counts what devices can hold now
        inbox = Inbox(
            rules.nonce,
            self._rejected,
            on_accepted=None if logged is None else partial(logged.accept, current),
            decode=None if compressor is None else lambda one: compressor.up(one, self._sent.get(one.slot, {})),
            trail=self._trail(round=current.number, exchange=current.exchange),
        )
        for upload in answering(self, logged, current, payloads) if logged is not None else ():
            inbox.take(upload)
        over = not payloads or (logged is not None and logged.is_over(current))
        before = [payload.nbytes for payload in payloads if over or payload.slot in inbox.won]
        report.clients += len(before)
        report.bytes_down += sum(before)

        def ask(payload: Payload, seconds: float) -> tuple[Message, Ticket] | None:
            return self._request(current, payload, config, seconds)

        stalest = self.stalest([payload.slot for payload in payloads]) if rules.hedge else ()
        spares = self._spares(current, payloads, inbox)
        return Exchange(current, grid, rules, payloads, inbox, ask, spares, stalest, over, self.fits)

    def _close(self, exchange: Exchange) -> None:
        """Record the costs of `exchange` and aggregate its uploads; used by both ways to drive a round."""
        report, counts = self._report, exchange.counts
        report.clients += counts["requests"]
        report.spares += counts["spares"]
        report.bytes_down += counts["bytes"]
        if self.log is not None and not exchange.over:
            self.log.end(exchange.current)
        report.exchanges += bool(exchange.payloads)
        report.seconds_training += time.perf_counter() - self._asked_at
        if isinstance(self.clock, VirtualClock):
            self._pass_time(exchange, self.clock)
        if len(exchange.inbox.won) > exchange.inherited:
            self._heard = True
        elif self._faults and not exchange.inbox.won:
            asked = {payload.client for payload in exchange.payloads}
            number, connected = exchange.current.number, len(self._available)
            end_if_common(self._faults, asked, number, connected, heard=self._heard, said=self._said)
        self.finish(exchange.current, exchange.inbox.uploads, len(exchange.payloads))
        if self.plan is not None:
            accepted = exchange.inbox.won.keys() - self._overruled.keys()
            report.width_replies.update(self.replies_by_size(exchange.payloads, accepted))
        self._ended_requests(exchange, self._overruled)

    def _trail(self, **place: int) -> Trail | None:
        """Return an empty trail for an exchange at `place`; None if nobody wants to know."""
        self._overruled, self._noticed, self._digests = {}, {}, {}
        if self.on_ended is None and self.tell is None:
            return None
        return Trail(place, self.tell, self.on_ended is not None)

    def _ended_requests(self, exchange: Exchange, overruled: Mapping[int, str] | None = None) -> None:
        """Hand over how each request of `exchange` ended."""
        trail = exchange.inbox.trail
        lines = (
            [] if trail is None else trail.lines(exchange.payloads, exchange.inbox.won, overruled or {}, self._noticed)
        )
        if self.on_ended is not None:
            for one in lines:
                self.on_ended(one)
        self._digests = {}

    def _digest(self, payload: Payload) -> str:
        """Return the digest of `payload`, "" if nobody asks for it; computed once for clients that get the same."""
        if self.on_ended is None:
            return ""
        key = id(payload.arrays), *map(id, payload.extras.values()), id(payload.scales) if payload.scales else 0
        if key not in self._digests:
            self._digests[key] = payload, digest_of(payload)  # with the payload, so that no other gets its id
        return self._digests[key][1]

    def _pass_time(self, exchange: Exchange, clock: VirtualClock) -> None:
        """Add what `exchange` takes on the virtual clock: as long as its slowest client."""
        visit, sent, metrics = self._visit(exchange.current), self._sent, self._report.metrics
        slowest = 0.0
        for one in exchange.payloads:
            nbytes, epochs = self._both_ways(one, sent.get(one.slot, {})), int(one.config.get("epochs", clock.epochs))
            slowest = max(slowest, clock.seconds(one.client, visit, nbytes, epochs))
        metrics["virtual_seconds"] = metrics.get("virtual_seconds", 0.0) + slowest

    def _claim_refused(self, _: int) -> None:
        self._report.rejected["partition_taken"] += 1

    def _waiting(self, connected: int, needed: int, seconds: float) -> None:
        if self.tell is not None:
            facts = {"connected": connected, "needed": needed, "seconds": seconds}
            self.tell("waiting_for_clients", {"round": self._report.round, **facts})

    def _rejected(self, client: int | None, error: UploadError) -> None:
        if error.reason != LOST:  # there is no reply
            self._report.rejected[error.reason] += 1
        self._heed(client, error)

    def _heed(self, client: int | None, error: UploadError) -> None:
        """Keep what a client says of the configuration, and log the rejection."""
        if client is not None and (fault := configuration_error(error)) is not None:
            self._faults[client] = fault
        self.on_rejected(client, error)

    def _spares(self, current: Round, payloads: Sequence[Payload], inbox: Inbox) -> list[int]:
        """Return the clients that may take over a slot of this exchange, in a seeded order.

        Those whose upload the log has in `inbox` have taken one over before a crash.
        """
        if not (self.interchangeable and (self.federation.reassign or self.federation.hedge)):
            return []
        busy = {payload.client for payload in payloads} | {upload.client for upload in inbox.uploads}
        free = sorted(set(self._available) - busy)
        order = stream(self.federation.seed, "spares", current.number, current.exchange).permutation(len(free))
        return [free[i] for i in order]

    def payloads(self, current: Round) -> list[Payload]:
        """Return the method's payloads, compressed if so configured; keep the models as sent if needed later."""
        if self._report.round != current.number:  # Flower's classic server drives the round
            self._report = RoundReport(current.number)
        payloads = self.dispatch(current)
        self._sent = {payload.slot: payload.arrays for payload in payloads} if self._defending else {}
        if self._compressor is None:
            return payloads
        self._compressor.begin_exchange()
        coded = [self._compressor.down(payload) for payload in payloads]
        self._sent = {payload.slot: received for payload, received in coded}
        return [payload for payload, _ in coded]

    def _request(
        self, current: Round, payload: Payload, config: Mapping[str, Any], seconds: float
    ) -> tuple[Message, Ticket] | None:
        """Return the message for `payload` and its ticket; None if its client is not connected, or cannot hold it."""
        node = self.nodes.online.get(payload.client)
        if node is None:
            return None
        if self.plan is not None and self.outgrown(payload):  # it came back with less after a crash
            return None
        self.requests[payload.client] += 1
        if self.on_request is not None:
            self.on_request(payload.client)
        payload.config = {
            **config,
            **payload.config,
            "server-round": current.number,
            "rounds": self.federation.rounds,
            "state": self.accepted.get(payload.client, 0),
            "keep": (self.accepted if self.durable is None else self.durable).get(payload.client, 0),
            "visit": self._visit(current),
            **({"base": self.base} if self.base else {}),
        }
        model, extras, scales = self._expected(payload, self._sent.get(payload.slot, {}))
        run, packed = self.federation.run, self._packed
        sent = self._digest(payload)
        return request(payload, current, run, node, model, extras, seconds, scales, packed, sent)

    def _expected(self, payload: Payload, received: Arrays) -> tuple[Spec, Mapping[str, Spec], Spec]:
        """Return what a reply to `payload`, which its client decodes to `received`, holds: model, extras and scales."""
        model, extras = self.upload_model(payload), self.upload_extras(payload)
        if self._compressor is None:
            return model, extras, {}
        model, scales = self._compressor.expected(model, received)
        return model, extras, scales

    def _both_ways(self, payload: Payload, received: Arrays) -> int:
        """Return the bytes of all array values in `payload` and in a reply to it."""
        model, extras, scales = self._expected(payload, received)
        return payload.nbytes + sum(nbytes_of(spec) for spec in (model, scales, *extras.values()))

    def _visit(self, current: Round) -> int:
        """Return the number under which a client stores its state of this exchange; it grows with every exchange."""
        return (current.number - 1) * self.exchanges + current.exchange + 1

    def on_rejected(self, client: int | None, error: UploadError) -> None:
        """Log a rejected reply, or a request that is lost. The server uses this as it is; tests may override it."""
        who = "unknown sender" if client is None else f"client {client}"
        if error.reason == LOST:
            log(WARNING, "fedcross: request to %s %s", who, error)
        else:
            log(WARNING, "fedcross: reply of %s rejected, %s", who, error)

    def finish(self, current: Round, uploads: list[Upload], asked: int) -> list[Upload]:
        """Aggregate what the defence accepts of `uploads`, where it is enough, and return it; `asked` were asked."""
        started = time.perf_counter()
        report = self._report
        uploads = self._enough(self._defend(uploads), self.federation.min_replies, "federation.min_replies=")
        report.dropped += asked - len(uploads)
        report.bytes_up += sum(upload.nbytes for upload in uploads)
        report.train_loss = self._mean_loss(uploads, report.train_loss)
        local = [u.metrics["local-accuracy"] for u in uploads if "local-accuracy" in u.metrics]
        if local and self.local_due(current.number):
            report.metrics["local_accuracy"] = float(np.mean(local))
        if self.observer is not None:
            self.observer(current, uploads)
        doubted = [slot for slot, why in self._overruled.items() if why == "quarantined"]
        self.doubted = doubted if len(uploads) > max(1, len(doubted)) else []
        report.metrics.update(self.aggregate(current, uploads))
        for upload in uploads:
            self.accepted[upload.client] = self._visit(current)
        report.seconds_aggregation += time.perf_counter() - started
        return uploads

    def _mean_loss(self, uploads: list[Upload], before: float | None) -> float | None:
        """Return the mean training loss over the examples of those that tell one; `before` if nobody does.

        With the defence on, one counts as ``defence.weight`` times the upper quartile at most and, where that is not
        below zero, as zero at least.
        """
        told = [(one.metrics["train-loss"], one.num_examples) for one in uploads if "train-loss" in one.metrics]
        if not told:
            return before
        if self._defending and (upper := sorted(loss for loss, _ in told)[max(0, 3 * len(told) // 4 - 1)]) >= 0:
            most = upper * self.federation.defence.weight
            told = [(min(max(loss, 0.0), most), examples) for loss, examples in told]
        return float(np.sum([loss * examples for loss, examples in told])) / sum(examples for _, examples in told)

    def _enough(self, uploads: list[Upload], fewest: int, rule: str) -> list[Upload]:
        """Return `uploads`; none, each rejected by `rule`, if there are fewer than `fewest`."""
        if len(uploads) >= fewest:
            return uploads
        for upload in uploads:
            self._overruled[upload.slot] = "too_few"
            self._rejected(upload.client, UploadError("too_few", f"{len(uploads)} replies, {rule}{fewest}"))
        return []

    @property
    def _defending(self) -> bool:
        return self.federation.defence.enabled and self.defended

    def _defend(self, uploads: list[Upload]) -> list[Upload]:
        """Return the uploads that the defence accepts; those it quarantines count as rejected."""
        sent, self._sent = [self._sent[upload.slot] for upload in uploads if self._sent], {}
        if not self._defending:
            return uploads
        number = self._round.exchange
        if not self.defender.can_judge(number, len(uploads)):
            return self._enough(uploads, 2, "the defence knows no usual update yet and needs at least ")
        trained = self.parameter_names
        others = [name for name in self.spec if name not in trained]
        sizes = self.all_sizes() if self.plan is not None else ()
        bands = Bands(self.sliced, sizes) if len(sizes) > 1 else None
        verdict = self.defender.judge(number, uploads, sent, trained, others, bands)
        beside = self.judge_extras(verdict.uploads)
        self._report.clipped += verdict.clipped
        self._report.lightened += verdict.lightened
        if bounded := verdict.bounded + beside.clipped:
            metrics = self._report.metrics
            metrics["extras_bounded"] = metrics.get("extras_bounded", 0) + bounded
        extras = [(upload, "extras norm", norm, limit) for upload, norm, limit in beside.quarantined]
        for upload, what, value, limit in [*verdict.quarantined, *extras]:
            self._overruled[upload.slot] = "quarantined"
            self._noticed[upload.slot] = f"{what} {value:.4g}, limit {limit:.4g}"
            self._rejected(upload.client, UploadError("quarantined", self._noticed[upload.slot]))
        return beside.uploads

    # ---- what a method may define ------------------------------------------------------------------------------

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Draw the clients (partition ids) of round `number`, uniformly without replacement."""
        count = min(self.federation.clients_per_round, len(available))
        drawn = stream(self.federation.seed, "sample", number).choice(len(available), size=count, replace=False)
        clients = tuple(available[i] for i in drawn)
        return clients if self.plan is None else self.suited(number, clients, available)

    def upload_model(self, payload: Payload) -> Spec:
        """Return the names, shapes and dtypes that the client must send as its model."""
        return self.spec if self.plan is None else self.spec_of(payload)

    def judge_extras(self, uploads: list[Upload]) -> Judgement:
        """Return what the defence accepts of the extras of `uploads`, whose models it has accepted.

        Called only with the defence on. A method whose server adds up what clients send beside the model must judge it
        here, because one value could otherwise undo what all others send. ``Judgement.clipped`` counts uploads whose
        extras were bounded. A quarantined upload counts as lost, so its client forgets the visit too.
        """
        return Judgement(uploads, [], 0)

    def upload_extras(self, payload: Payload) -> Mapping[str, Spec]:
        """Return names, shapes and dtypes of the groups of arrays that the client must send beside its model."""
        return {}

    @classmethod
    def reveals(cls, params: P) -> bool:
        """Return whether clients send more than their models: differential privacy would not protect it."""
        return cls.upload_extras is not Method.upload_extras

    def evaluation_models(self) -> list[Arrays]:
        """Return the models to evaluate; their mean score on the test set is the method's score of this round.

        By default this is the global model. With an empty list nothing is evaluated.
        """
        return [self.evaluation_arrays()]

    def evaluation_arrays(self) -> Arrays:
        """Return the weights to deploy, for the network of :meth:`evaluation_network`."""
        return self.global_model()

    def stalest(self, slots: Sequence[int]) -> Sequence[int]:
        """Return `slots`, ordered so that the least recently trained models come first."""
        return slots

    def stray(self, reply: Message) -> None:
        """Take a train reply that somebody else has pulled from the grid; only an asynchronous method can use one."""

    def checkpointed(self) -> None:
        """Note that a checkpoint has been written and the log of replies emptied."""

    # ---- the whole state --------------------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """Return the method's state together with the state that this base class keeps."""
        state = self.state()
        accepted = {str(client): visit for client, visit in self.accepted.items()}
        requests = {str(client): count for client, count in self.requests.items()}
        own: dict[str, Any] = {"_accepted": accepted, "_requests": requests, "_model": self.spec}
        own["_parameters"] = self.parameter_names
        if self.tied:
            own["_tied"] = dict(self.tied)
        own |= self.defender.state()
        if self.plan is not None:
            own["_slices"] = self.plan.plain()
        coded = {} if self._compressor is None else self._compressor.state()
        return State({**state.arrays, **coded}, {**state.values, **own})

    def resume(self, state: State) -> None:
        """Continue from what :meth:`checkpoint` returned; a StorageError if it is of another model."""
        state = state.fitted(self.spec)
        values = dict(state.values)
        self.accepted = {int(client): int(visit) for client, visit in values.pop("_accepted", {}).items()}
        self.requests = Counter({int(client): int(n) for client, n in values.pop("_requests", {}).items()})
        self.tied = values.pop("_tied", self.tied)
        self.defender.restore(values, self.exchanges)
        for known in ("_model", "_parameters", "_slices"):  # for tools without a network; they are set already
            values.pop(known, None)
        arrays = state.arrays if self._compressor is None else self._compressor.restore(state.arrays)
        self.restore(State(arrays, values))
