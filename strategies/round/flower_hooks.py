"""Flower's ``Strategy`` over the rounds of a method: any Flower ServerApp can use one.

Flower drives a strategy in one of two ways, and both do the rounds of :mod:`strategies.round.base`: its entry point
:meth:`FlowerHooks.start` runs them all; its loop calls the hooks ``configure_train`` and ``aggregate_train`` instead,
and carries the messages in between by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import INFO
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.logger import log
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

from fedcross.core.errors import FederationError
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.contract import Contract
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.federation import RoundReport
from fedcross.strategies.wire.protocol import Round
from fedcross.strategies.wire.records import Arrays, encode

#: Rounds of :meth:`FlowerHooks.start` where nobody says how many.
FLOWER_ROUNDS = 3


class FlowerHooks(Contract[P], Strategy):
    """What Flower calls; the abstract methods here are the round's, :class:`strategies.round.base.Method` has them."""

    #: Between ``configure_train`` and ``aggregate_train``: the exchange that Flower's loop carries out.
    _exchange: Exchange | None = None
    _round: Round

    @property
    @abstractmethod
    def report(self) -> RoundReport:
        """What the round that is going on, or the last one, has cost and given so far."""

    @abstractmethod
    def begin(self, arrays: Arrays, parameters: Collection[str] | None = None) -> None:
        """Start from the initial model."""

    @abstractmethod
    def run_round(self, number: int, grid: Grid, config: Mapping[str, Any] | None = None) -> RoundReport:
        """Do one global round."""

    @abstractmethod
    def _begin_round(self, number: int, grid: Grid) -> tuple[int, ...]:
        """Return the clients of a round."""

    @abstractmethod
    def _open(self, current: Round, grid: Grid, config: Mapping[str, Any]) -> Exchange:
        """Return one exchange of a round, not begun."""

    @abstractmethod
    def _close(self, exchange: Exchange) -> None:
        """Aggregate what `exchange` brought."""

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
        loss = self.report.train_loss
        return MetricRecord({**({} if loss is None else {"train-loss": loss}), **self.report.metrics})

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
        clients = self._round.clients if index else self._begin_round(number + 1, grid)
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
        log(INFO, "\t%s(%s)", type(self).__name__, self.params)
