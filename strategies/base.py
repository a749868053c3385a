"""The round, written once: sampling, requests, validation, accounting, state.

A method derives from :class:`Method`, says what each sampled client gets (:meth:`Method.dispatch`) and what becomes of
the uploads (:meth:`Method.aggregate`). ``Method`` is a Flower ``Strategy``: it can be handed to any Flower ServerApp.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from pydantic import Field, model_validator
from torch import nn

from strategies.compression import Compression, Compressor
from strategies.defence import Defence, defend
from strategies.guard import check
from strategies.objective import Objective
from strategies.protocol import Payload, Round, Ticket, Upload, request
from strategies.roster import Roster, receive
from strategies.wire import Arrays, Spec, encode, spec_of
from tasks.errors import FederationError, UploadError
from tasks.randomness import key, stream
from tasks.settings import Settings


class Federation(Settings):
    """How a method meets its clients; the same for every method.

    `clients_per_round` clients are drawn each round. A round ends after `deadline_s` seconds at the latest. `nonce`
    asks for fedcross clients, which echo the request's random nonce; without it any Flower client may answer. `defence`
    is against poisoned uploads (:mod:`strategies.defence`). `compression` (:mod:`strategies.compression`) needs
    fedcross clients.
    """

    seed: int = Field(0, ge=0)
    rounds: int = Field(1, ge=1, description="planned global rounds")
    clients_per_round: int = Field(10, ge=1)
    min_clients: int | None = Field(None, ge=1, description="wait for so many; clients_per_round if unset")
    wait_s: float = Field(120.0, gt=0, description="seconds to wait for min_clients")
    deadline_s: float = Field(3600.0, gt=0, description="seconds until a round ends without the missing clients")
    run: str = Field("", description="identity of the run, bound into every message")
    nonce: bool = False
    defence: Defence = Defence()
    compression: Compression = Compression()

    @model_validator(mode="after")
    def _clients_can_decode(self) -> Self:
        if not self.compression.exact and not self.nonce:
            raise ValueError("compression needs fedcross clients on the same configuration: set nonce=True")
        return self


@dataclass
class State:
    """All that resume needs: arrays by name, and JSON values."""

    arrays: Arrays = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass
class RoundReport:
    """What one global round cost and gave; the source of one line of ``metrics.jsonl``."""

    round: int
    clients: int = 0
    dropped: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    clipped: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    exchanges: int = 0
    train_loss: float | None = None
    seconds_training: float = 0.0
    seconds_aggregation: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


class Method(Strategy):
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

    Params: ClassVar[type[Settings]] = Settings
    Objective: ClassVar[type[Objective]] = Objective
    #: Settings, by dotted name, that a continued run may have otherwise than before (``method.k``, say).
    may_change: ClassVar[frozenset[str]] = frozenset()
    #: Whether the defence makes sense: not where clients do not share one model's fate (references).
    defended: ClassVar[bool] = True
    #: Exchanges of messages in one global round.
    exchanges: int = 1

    def __init__(self, params: Settings | None = None, federation: Federation | None = None, **values: Any) -> None:
        own = {name: value for name, value in values.items() if name not in Federation.model_fields}
        meeting = {name: value for name, value in values.items() if name in Federation.model_fields}
        self.params = params if params is not None else self.Params.model_validate(own)
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
        self._tickets: dict[str, Ticket] = {}
        #: (client, slot) -> the model it got in this exchange: views, kept while defence or compression need it.
        self._sent: dict[tuple[int, int], Arrays] = {}
        self._compressor = Compressor(self.federation.compression, {})
        self._messages: list[tuple[Message, Ticket]] | None = None
        self._round = Round(0, 0, (), self.federation.seed)
        self._report = RoundReport(0)
        #: Told about the accepted uploads of every exchange, before they are aggregated.
        self.observer: Callable[[Round, Sequence[Upload]], None] | None = None

    # ---- what a method defines -------------------------------------------------------------------------------

    @abstractmethod
    def setup(self, arrays: Arrays) -> None:
        """Create the server state from the initial model."""

    @abstractmethod
    def dispatch(self, current: Round) -> list[Payload]:
        """Return what each of ``current.clients`` gets, one payload per client.

        An exchange without payloads is skipped: it is not counted, and :meth:`aggregate` gets an empty list.
        """

    @abstractmethod
    def aggregate(self, current: Round, uploads: list[Upload]) -> dict[str, float]:
        """Update the server state from the accepted uploads, ordered by slot; return metrics for the round.

        Called with an empty list when every client was lost: then the state stays as it is.
        """

    @abstractmethod
    def global_model(self) -> Arrays:
        """Return the model to evaluate and to deploy."""

    def evaluation_models(self) -> list[Arrays]:
        """Return the models whose mean score on the test set is the method's score of this round.

        The global model, where there is one; nothing is scored if the list is empty.
        """
        return [self.evaluation_arrays()]

    def evaluation_arrays(self) -> Arrays:
        """Return what to deploy: weights for :meth:`evaluation_network`."""
        return self.global_model()

    @abstractmethod
    def state(self) -> State:
        """Return all that :meth:`restore` needs to continue exactly here."""

    @abstractmethod
    def restore(self, state: State) -> None:
        """Take over what :meth:`state` returned; :meth:`begin` has been called before."""

    def sample(self, number: int, available: Sequence[int]) -> tuple[int, ...]:
        """Return the partitions that take part in round `number`, drawn uniformly without replacement."""
        count = min(self.federation.clients_per_round, len(available))
        drawn = stream(self.federation.seed, "sample", number).choice(len(available), size=count, replace=False)
        return tuple(available[i] for i in drawn)

    def upload_extras(self, payload: Payload) -> Mapping[str, Spec]:
        """Return the groups of arrays that the client must send beside its model."""
        return {}

    def upload_model(self, payload: Payload) -> Spec:
        """Return the names, shapes and dtypes that the client must send as its model."""
        return self.spec

    @classmethod
    def build_model(cls, model: nn.Module, params: Settings) -> nn.Module:
        """Return the network that this method trains, given the configured `model` (a head added, say)."""
        return model

    @classmethod
    def network(cls, model: nn.Module, params: Settings, seed: int) -> nn.Module:
        """Return :meth:`build_model`'s network; the weights that it adds to `model` depend on `seed` and nothing else.

        The CPU's global generator is borrowed for them and put back as it was, as in :func:`tasks.models.create`.
        """
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(key(seed, "method model"))
            return cls.build_model(model, params)

    @classmethod
    def evaluation_network(cls, network: nn.Module, params: Settings) -> nn.Module:
        """Return the network that :meth:`evaluation_arrays` belongs to, given the one that is trained.

        Only where inference needs more than what travels (FedFusion: the extractor of the round before).
        """
        return network

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
        for exchange in range(self.exchanges):
            self._exchange(Round(number, exchange, clients, self.federation.seed), grid, config or {})
        return self._report

    def _draw(self, number: int, grid: Grid) -> tuple[int, ...]:
        needed = self.federation.min_clients or self.federation.clients_per_round
        available = self.roster.wait_for(grid, needed, self.federation.wait_s)
        return self.sample(number, available)

    def _exchange(self, current: Round, grid: Grid, config: Mapping[str, Any]) -> None:
        started = time.perf_counter()
        outgoing = self._requests(current, config)
        ids = list(grid.push_messages([message for message, _ in outgoing]))
        tickets = dict(zip(ids, (ticket for _, ticket in outgoing)))
        del outgoing
        self._report.clients += len(tickets)
        self._report.exchanges += bool(tickets)
        uploads = self._collect(receive(grid, tickets, self.federation.deadline_s), tickets)
        self._report.seconds_training += time.perf_counter() - started
        self._finish(current, uploads, len(tickets))

    def _requests(self, current: Round, config: Mapping[str, Any]) -> list[tuple[Message, Ticket]]:
        self._round = current
        self._sent = {}
        outgoing = []
        self._compressor.begin_exchange()
        payloads = self.dispatch(current)
        for payload, received in map(self._compressor.down, payloads):
            if self._defending or not self.federation.compression.exact:
                self._sent[payload.client, payload.slot] = received
            model, scales = self._compressor.expected(self.upload_model(payload), received)
            payload.config = {
                **config,
                **payload.config,
                "server-round": current.number,
                "rounds": self.federation.rounds,
                "state": self.accepted.get(payload.client, 0),
                "keep": (self.accepted if self.durable is None else self.durable).get(payload.client, 0),
                "visit": self._visit(current),
            }
            outgoing.append(
                request(
                    payload,
                    current,
                    self.federation.run,
                    self.roster.node(payload.client),
                    model,
                    self.upload_extras(payload),
                    self.federation.deadline_s,
                    scales,
                )
            )
            self._report.bytes_down += payload.nbytes
            self.requests[payload.client] += 1
        return outgoing

    def _visit(self, current: Round) -> int:
        """Return the number that names a client's state after this exchange; grows with every exchange."""
        return (current.number - 1) * self.exchanges + current.exchange + 1

    def _collect(self, replies: Iterable[Message], tickets: Mapping[str, Ticket]) -> list[Upload]:
        """Return the accepted uploads by slot; count the rest by reason. The first valid reply of a slot wins."""
        accepted: dict[str, Upload] = {}
        for reply in replies:
            asked = reply.metadata.reply_to_message_id
            try:
                if asked not in tickets or asked in accepted:
                    raise UploadError("duplicate" if asked in accepted else "unknown", "not an open request")
                upload = check(reply, tickets[asked].expected, nonce=self.federation.nonce)
                received = self._sent.get((upload.client, upload.slot), {})
                accepted[asked] = self._compressor.up(upload, received)
            except UploadError as error:
                self._report.rejected[error.reason] += 1
                self.on_rejected(tickets[asked].expected.client if asked in tickets else None, error)
        return sorted(accepted.values(), key=lambda upload: upload.slot)

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
        sent = [self._sent[upload.client, upload.slot] for upload in uploads]
        self._sent = {}
        judgement = defend(self.federation.defence, uploads, sent, self.parameter_names)
        self._report.clipped += judgement.clipped
        for upload, norm, limit in judgement.quarantined:
            error = UploadError("quarantined", f"update norm {norm:.4g}, limit {limit:.4g}")
            self._report.rejected[error.reason] += 1
            self.on_rejected(upload.client, error)
        return judgement.uploads

    # ---- the whole state --------------------------------------------------------------------------------------

    def checkpoint(self) -> State:
        """Return the method's state with the base's own part."""
        state = self.state()
        accepted = {str(client): visit for client, visit in self.accepted.items()}
        requests = {str(client): count for client, count in self.requests.items()}
        own = {"_accepted": accepted, "_requests": requests, "_model": self.spec, "_parameters": self.parameter_names}
        return State({**state.arrays, **self._compressor.state()}, {**state.values, **own})

    def resume(self, state: State) -> None:
        """Continue from what :meth:`checkpoint` returned."""
        values = dict(state.values)
        self.accepted = {int(client): int(visit) for client, visit in values.pop("_accepted", {}).items()}
        self.requests = Counter({int(client): int(n) for client, n in values.pop("_requests", {}).items()})
        for known in ("_model", "_parameters"):  # for readers that have no network; `begin` has set both
            values.pop(known, None)
        self.restore(State(self._compressor.restore(state.arrays), values))

    # ---- Flower's Strategy ------------------------------------------------------------------------------------

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run `num_rounds` global rounds; Flower's own entry point, so that any ServerApp can use a method.

        Parameters are those of Flower's ``Strategy.start``; `evaluate_config` is not used, the global model is
        evaluated by `evaluate_fn`.
        """
        self.federation = self.federation.model_copy(update={"deadline_s": timeout, "rounds": num_rounds})
        self.begin({name: array.numpy() for name, array in initial_arrays.items()})
        result = Result()
        result.arrays = initial_arrays
        for number in range(1, num_rounds + 1):
            report = self.run_round(number, grid, dict(train_config or {}))
            values = {"train-loss": report.train_loss} if report.train_loss is not None else {}
            result.train_metrics_clientapp[number] = MetricRecord({**values, **report.metrics})
            result.arrays = encode(self.global_model())
            if evaluate_fn and (measured := evaluate_fn(number, result.arrays)) is not None:
                result.evaluate_metrics_serverapp[number] = measured
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return this exchange's requests. `server_round` counts exchanges; `arrays` is used in the first call only."""
        if not self.spec:
            self.begin({name: array.numpy() for name, array in arrays.items()})
        number, exchange = divmod(server_round - 1, self.exchanges)
        self._report = RoundReport(number + 1)
        clients = self._draw(number + 1, grid) if exchange == 0 else self._round.clients
        current = Round(number + 1, exchange, clients, self.federation.seed)
        self._messages = self._requests(current, dict(config))
        return [message for message, _ in self._messages]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate the replies, aggregate, and return the global model with the round's metrics."""
        if self._messages is None:
            raise FederationError(f"aggregate_train({server_round}) without configure_train before it")
        tickets = {message.metadata.message_id: ticket for message, ticket in self._messages}
        self._messages = None
        self._finish(self._round, self._collect(replies, tickets), len(tickets))
        values = {"train-loss": self._report.train_loss} if self._report.train_loss is not None else {}
        return encode(self.global_model()), MetricRecord({**values, **self._report.metrics})

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
