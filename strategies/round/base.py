"""The round, written once: sampling, requests, validation, accounting, state.

A method derives from :class:`Method` and defines what :class:`strategies.round.contract.Contract` asks for.
``Method`` is a Flower ``Strategy``: it can be handed to any Flower ServerApp.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from fedcross.core.errors import FederationError, UploadError
from fedcross.core.randomness import stream
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.contract import Contract
from fedcross.strategies.round.defence import defend
from fedcross.strategies.round.exchange import Desk, Exchange
from fedcross.strategies.round.federation import Federation, ReplyLog, RoundReport, State
from fedcross.strategies.round.nodes import Roster
from fedcross.strategies.wire.compression import Compressor
from fedcross.strategies.wire.protocol import Payload, Round, Ticket, Upload, request
from fedcross.strategies.wire.records import Arrays, Spec, encode, spec_of

#: Rounds of Flower's ``Strategy.start`` where nobody says how many.
FLOWER_ROUNDS = 3


class Method(Contract[P]):
    """Base of all methods.

    Parameters
    ----------
    params : Settings, optional
        The method's own parameters; instead of it they can be given by name.
    federation : Federation, optional
        How the method meets its clients; instead of it the fields can be given by name.
    **values
        Fields of ``Params`` and of :class:`Federation`.
    """

    def __init__(self, params: P | None = None, federation: Federation | None = None, **values: Any) -> None:
        own = {name: value for name, value in values.items() if name not in Federation.model_fields}
        meeting = {name: value for name, value in values.items() if name in Federation.model_fields}
        self.params = params if params is not None else cast(P, self.Params.model_validate(own))
        self.federation = federation if federation is not None else Federation.model_validate(meeting)
        self.roster = Roster()
        #: Client -> how many requests went to it, answered or not.
        self.requests: Counter[int] = Counter()
        #: Client -> its last accepted visit, the one it continues from.
        self.accepted: dict[int, int] = {}
        #: The same as of the oldest checkpoint that a resume may go back to; clients forget nothing from there on.
        self.durable: dict[int, int] | None = None
        self.spec: Spec = {}
        self.parameter_names: tuple[str, ...] = ()
        #: Further names in a ``state_dict`` -> names of arrays, for networks with tied weights.
        self.tied: Mapping[str, str] = {}
        self._available: list[int] = []
        #: Slot -> the model its client gets in this exchange: views, kept while defence or compression need it.
        self._sent: dict[int, Arrays] = {}
        self._compressor = Compressor(self.federation.compression, {})
        #: Between ``configure_train`` and ``aggregate_train``: the exchange that Flower's loop carries out.
        self._exchange: Exchange | None = None
        self._started = 0.0
        self._round = Round(0, 0, (), self.federation.seed)
        self._report = RoundReport(0)
        #: Where accepted replies are kept until the round is in a checkpoint; None for nowhere.
        self.log: ReplyLog | None = None
        #: Told about the accepted uploads of every exchange, before they are aggregated.
        self.observer: Callable[[Round, Sequence[Upload]], None] | None = None

    # ---- the round ------------------------------------------------------------------------------------------

    def begin(self, arrays: Arrays, parameters: Collection[str] | None = None) -> None:
        """Start from `arrays`, the initial model; `parameters` names what is trained (all floats if None)."""
        self.spec = spec_of(arrays)
        floats = [name for name, a in arrays.items() if a.dtype.kind == "f"]
        self.parameter_names = tuple(n for n in floats if parameters is None or n in parameters)
        initial = {name: arrays[name] for name in self.parameter_names}
        self._compressor = Compressor(self.federation.compression, {} if self.federation.compression.exact else initial)
        self.setup(arrays)

    def run_round(self, number: int, grid: Grid, config: Mapping[str, Any] | None = None) -> RoundReport:
        """Do one global round, all its exchanges, and return its report.

        Raises
        ------
        FederationError
            If fewer than ``min_clients`` are connected in the end.
        """
        self._report = RoundReport(number)
        clients = self._draw(number, grid)
        for index in range(self.exchanges):
            exchange = self._open(Round(number, index, clients, self.federation.seed), grid, config or {})
            exchange.carry_out()
            self._close(exchange)
        return self._report

    @property
    def report(self) -> RoundReport:
        """What the round that is going on, or the last one, has cost and given so far."""
        return self._report

    def _draw(self, number: int, grid: Grid) -> tuple[int, ...]:
        rules, roster = self.federation, self.roster
        needed = rules.min_clients or rules.clients_per_round
        if self.log is not None and (before := self.log.available(number)) is not None:
            clients = self.sample(number, before)
            self._available = roster.wait_for(grid, needed, rules.wait_s, clients)
            return clients
        self._available = roster.wait_for(grid, needed, rules.wait_s)
        if self.log is not None:
            self.log.draw(number, self._available)
        return self.sample(number, self._available)

    def _open(self, current: Round, grid: Grid, config: Mapping[str, Any]) -> Exchange:
        """Return this exchange, with what the log has of it; both drivers of a round begin here."""
        self._started = time.perf_counter()
        report, log = self._report, self.log
        payloads = self._payloads(current, config)
        desk = self._desk(current)
        for upload in log.accepted(current) if log is not None else ():
            desk.take(upload)
            self.requests[upload.client] += 1
        over = not payloads or (log is not None and log.is_over(current))
        before = [payload.nbytes for payload in payloads if over or payload.slot in desk.won]
        report.clients += len(before)
        report.bytes_down += sum(before)

        def ask(payload: Payload, seconds: float) -> tuple[Message, Ticket] | None:
            return self._request(current, self._addressed(current, payload, config), seconds)

        stalest = self.stalest([payload.slot for payload in payloads])
        spares = self._spares(current, payloads)
        return Exchange(current, grid, self.federation, payloads, desk, ask, spares, stalest, over)

    def _close(self, exchange: Exchange) -> None:
        """Account for `exchange` and aggregate what it brought; both drivers of a round end here."""
        report, told = self._report, exchange.told
        report.clients += told["asked"]
        report.spares += told["spares"]
        report.bytes_down += told["bytes"]
        if self.log is not None and not exchange.over:
            self.log.end(exchange.current)
        report.exchanges += bool(exchange.payloads)
        report.seconds_training += time.perf_counter() - self._started
        self._finish(exchange.current, exchange.desk.uploads, len(exchange.payloads))

    def _desk(self, current: Round) -> Desk:
        """Return where the replies of this exchange are judged."""

        def accepted(upload: Upload) -> None:
            if self.log is not None:
                self.log.accept(current, upload)

        def decoded(upload: Upload) -> Upload:
            return self._compressor.up(upload, self._sent.get(upload.slot, {}))

        return Desk(self.federation.nonce, accepted, self._rejected, decoded)

    def _rejected(self, client: int | None, error: UploadError) -> None:
        self._report.rejected[error.reason] += 1
        self.on_rejected(client, error)

    def _spares(self, current: Round, payloads: Sequence[Payload]) -> list[int]:
        """Return the clients that may take over a slot of this exchange, in a seeded order."""
        if not (self.interchangeable and (self.federation.reassign or self.federation.hedge)):
            return []
        free = sorted(set(self._available) - {payload.client for payload in payloads})
        order = stream(self.federation.seed, "spares", current.number, current.exchange).permutation(len(free))
        return [free[i] for i in order]

    def _payloads(self, current: Round, config: Mapping[str, Any]) -> list[Payload]:
        self._round = current
        self._sent = {}
        self._compressor.begin_exchange()
        payloads = []
        for payload, received in map(self._compressor.down, self.dispatch(current)):
            if self._defending or not self.federation.compression.exact:
                self._sent[payload.slot] = received
            payloads.append(self._addressed(current, payload, config))
        return payloads

    def _addressed(self, current: Round, payload: Payload, config: Mapping[str, Any]) -> Payload:
        """Return `payload` with what every request says to its client."""
        payload.config = {
            **config,
            **payload.config,
            "server-round": current.number,
            "rounds": self.federation.rounds,
            "state": self.accepted.get(payload.client, 0),
            "keep": (self.accepted if self.durable is None else self.durable).get(payload.client, 0),
            "visit": self._visit(current),
        }
        return payload

    def _request(self, current: Round, payload: Payload, seconds: float) -> tuple[Message, Ticket] | None:
        """Return the message for `payload` and its ticket; None if its client is not connected."""
        if not self.roster.has(payload.client):
            return None
        self.requests[payload.client] += 1
        node, run = self.roster.node(payload.client), self.federation.run
        model, scales = self._compressor.expected(self.upload_model(payload), self._sent.get(payload.slot, {}))
        extras, packed = self.upload_extras(payload), self.federation.packs
        return request(payload, current, run, node, model, extras, seconds, scales, packed)

    def _visit(self, current: Round) -> int:
        """Return the number that names a client's state after this exchange; grows with every exchange."""
        return (current.number - 1) * self.exchanges + current.exchange + 1

    def on_rejected(self, client: int | None, error: UploadError) -> None:
        """Log a rejected reply; the server overrides nothing here, tests and tools may."""
        from logging import WARNING

        from flwr.common.logger import log

        who = "unknown sender" if client is None else f"client {client}"
        log(WARNING, "fedcross: reply of %s rejected, %s", who, error)

    def _finish(self, current: Round, uploads: list[Upload], asked: int) -> None:
        started = time.perf_counter()
        report = self._report
        uploads = self._defend(uploads)
        if 0 < len(uploads) < self.federation.min_replies:
            for upload in uploads:
                few = f"{len(uploads)} replies, federation.min_replies={self.federation.min_replies}"
                self._rejected(upload.client, UploadError("too_few", few))
            uploads = []
        report.dropped += asked - len(uploads)
        report.bytes_up += sum(upload.nbytes for upload in uploads)
        examples = sum(upload.num_examples for upload in uploads)
        losses = [u.metrics["train-loss"] * u.num_examples for u in uploads if "train-loss" in u.metrics]
        if losses:
            report.train_loss = float(np.sum(losses)) / examples
        local = [u.metrics["local-accuracy"] for u in uploads if "local-accuracy" in u.metrics]
        if local:
            report.metrics["local_accuracy"] = float(np.mean(local))
        if self.observer is not None:
            self.observer(current, uploads)
        report.metrics.update(self.aggregate(current, uploads))
        for upload in uploads:
            self.accepted[upload.client] = self._visit(current)
        report.seconds_aggregation += time.perf_counter() - started

    @property
    def _defending(self) -> bool:
        return self.federation.defence.enabled and self.defended

    def _defend(self, uploads: list[Upload]) -> list[Upload]:
        """Return what of `uploads` the defence lets through; quarantined ones count as rejected."""
        if not self._defending:
            self._sent = {}
            return uploads
        sent = [self._sent[upload.slot] for upload in uploads]
        self._sent = {}
        judgement = defend(self.federation.defence, uploads, sent, self.parameter_names)
        self._report.clipped += judgement.clipped
        self._report.lightened += judgement.lightened
        for upload, norm, limit in judgement.quarantined:
            self._rejected(upload.client, UploadError("quarantined", f"update norm {norm:.4g}, limit {limit:.4g}"))
        return judgement.uploads

    # ---- the whole state --------------------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """Return the method's state with the base's own part."""
        state = self.state()
        accepted = {str(client): visit for client, visit in self.accepted.items()}
        requests = {str(client): count for client, count in self.requests.items()}
        own = {"_accepted": accepted, "_requests": requests, "_model": self.spec, "_parameters": self.parameter_names}
        if self.tied:
            own["_tied"] = dict(self.tied)
        return State({**state.arrays, **self._compressor.state()}, {**state.values, **own})

    def resume(self, state: State) -> None:
        """Continue from what :meth:`checkpoint` returned."""
        values = dict(state.values)
        self.accepted = {int(client): int(visit) for client, visit in values.pop("_accepted", {}).items()}
        self.requests = Counter({int(client): int(n) for client, n in values.pop("_requests", {}).items()})
        self.tied = values.pop("_tied", self.tied)
        for known in ("_model", "_parameters"):  # for readers that have no network; `begin` has set both
            values.pop(known, None)
        self.restore(State(self._compressor.restore(state.arrays), values))

    # ---- Flower's Strategy ------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run global rounds; Flower's own entry point, so that any ServerApp can use a method.

        Parameters
        ----------
        grid : Grid
            Where the clients are.
        initial_arrays : ArrayRecord
            The initial model.
        num_rounds : int, optional
            Global rounds; those that the method was given as ``rounds`` if None, else 3 as in Flower.
        timeout : float, optional
            Seconds until an exchange ends without the missing clients; the method's own ``deadline_s`` if None.
        train_config : ConfigRecord, optional
            Goes to the clients with every request.
        evaluate_config : ConfigRecord, optional
            Not used: clients do not evaluate, `evaluate_fn` does.
        evaluate_fn : callable, optional
            ``(round, model) -> metrics``; called with the initial model as round 0 and after every round.

        Returns
        -------
        Result
            As Flower fills it: the last global model, and metrics by round.
        """
        if num_rounds is None:
            num_rounds = self.federation.rounds if "rounds" in self.federation.model_fields_set else FLOWER_ROUNDS
        deadline = self.federation.deadline_s if timeout is None else timeout
        self.federation = self.federation.model_copy(update={"deadline_s": deadline, "rounds": num_rounds})
        self.begin({name: array.numpy() for name, array in initial_arrays.items()})
        self.summary()
        result, arrays = Result(), initial_arrays
        for number in range(num_rounds + 1):
            if number:
                self.run_round(number, grid, dict(train_config or {}))
                result.arrays = arrays = encode(self.global_model())
                result.train_metrics_clientapp[number] = self._metrics()
            if evaluate_fn and (measured := evaluate_fn(number, arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = measured
        return result

    def _metrics(self) -> MetricRecord:
        """Return the round's metrics as Flower keeps them."""
        loss = self._report.train_loss
        return MetricRecord({**({} if loss is None else {"train-loss": loss}), **self._report.metrics})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open an exchange and return its first requests, for a caller that sends them and collects the replies.

        `server_round` counts exchanges: a method with two per round is called twice for each. `arrays` is used in the
        first call only; from then on the method's own state decides.

        Notes
        -----
        The exchange is the one that :meth:`run_round` carries out, with its log, spares, defence and accounting. What
        these two hooks leave to their caller: it alone ends the wait, so ``deadline_s`` limits only what
        :meth:`aggregate_train` itself still asks for, ``enough_replies`` ends nothing early, a failed slot goes to a
        spare client and a silent client is asked again only when the caller has handed in the rest, and accepted
        replies reach the log then, not as each arrives. :meth:`start` and :meth:`run_round` have no such limits.
        """
        if not self.spec:
            self.begin({name: array.numpy() for name, array in arrays.items()})
        number, index = divmod(server_round - 1, self.exchanges)
        if index == 0:
            self._report = RoundReport(number + 1)
            clients = self._draw(number + 1, grid)
        else:
            clients = self._round.clients
        self._exchange = self._open(Round(number + 1, index, clients, self.federation.seed), grid, dict(config))
        return self._exchange.open()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Judge the replies, ask spares for what is lost, aggregate; return the global model and the metrics."""
        if self._exchange is None:
            raise FederationError(f"aggregate_train({server_round}) without configure_train before it")
        exchange, self._exchange = self._exchange, None
        exchange.hand_in(replies)
        self._close(exchange)
        return encode(self.global_model()), self._metrics()

    def configure_evaluate(
        self,
        server_round: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
        grid: Grid,
    ) -> Iterable[Message]:
        """Return nothing: the global model is evaluated on the server."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return nothing: the global model is evaluated on the server."""
        return None

    def summary(self) -> None:
        """Log the method and its parameters."""
        from logging import INFO

        from flwr.common.logger import log

        log(INFO, "\t%s(%s)", type(self).__name__, self.params)
