"""Flower's ``Strategy`` interface of a method, so that any Flower ServerApp can use it.

Flower drives a strategy in one of two ways, and both run the rounds of :mod:`strategies.round.base`. The entry point
:meth:`FlowerHooks.start` runs all rounds. Flower's own loop instead calls the hooks ``configure_train`` and
``aggregate_train``, and sends and collects the messages in between itself.
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

from fedcross.core.errors import ConfigError, FederationError, counted
from fedcross.strategies.parts.objective import P
from fedcross.strategies.round.contract import Contract
from fedcross.strategies.round.exchange import Exchange
from fedcross.strategies.round.federation import RoundReport
from fedcross.strategies.wire.protocol import Round
from fedcross.strategies.wire.records import Arrays, encode

#: Number of rounds of :meth:`FlowerHooks.start` if the caller gives none.
FLOWER_ROUNDS = 3
#: Last part of the names that torch gives to what batch normalisation measures.
STATISTICS = ("running_mean", "running_var")


def trained(arrays: Arrays, parameters: Collection[str] | None = None) -> Collection[str]:
    """Return the names of the entries of a ``state_dict`` that are trained: `parameters`, where they are given.

    Otherwise these are all float entries but the statistics of batch normalisation, by torch's names for them. A step
    on a variance could take it below zero.

    Raises
    ------
    ConfigError
        If `parameters` has a name that `arrays` has not.
    """
    if parameters is None:
        return [n for n, a in arrays.items() if a.dtype.kind == "f" and n.rpartition(".")[2] not in STATISTICS]
    if missing := [name for name in parameters if name not in arrays]:
        raise ConfigError(f"parameters: the initial model has no {missing[0]!r}. It has {', '.join(arrays)}.")
    return parameters


class FlowerHooks(Contract[P], Strategy):
    """The methods that Flower calls; :class:`strategies.round.base.Method` implements the abstract ones."""

    #: The open exchange between ``configure_train`` and ``aggregate_train``, whose messages Flower's loop sends.
    _exchange: Exchange | None = None
    _round: Round

    @property
    @abstractmethod
    def report(self) -> RoundReport:
        """Costs and metrics of the current round so far, or of the last one between rounds."""

    @abstractmethod
    def begin(self, arrays: Arrays, parameters: Collection[str] | None = None) -> None:
        """Start from the initial model."""

    @abstractmethod
    def run_round(self, number: int, grid: Grid, config: Mapping[str, Any] | None = None) -> RoundReport:
        """Run one global round."""

    @abstractmethod
    def _begin_round(self, number: int, grid: Grid) -> tuple[int, ...]:
        """Return the clients of a round."""

    @abstractmethod
    def _open(self, current: Round, grid: Grid, config: Mapping[str, Any]) -> Exchange:
        """Prepare one exchange of a round; nothing is sent yet."""

    @abstractmethod
    def _close(self, exchange: Exchange) -> None:
        """Aggregate the uploads of `exchange`."""

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int | None = None,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        parameters: Collection[str] | None = None,
    ) -> Result:
        """Run global rounds; Flower's own entry point, so that any ServerApp can use a method.

        Parameters
        ----------
        grid : Grid
            Connection to the clients.
        initial_arrays : ArrayRecord
            The initial model.
        num_rounds : int, optional
            Number of global rounds. If None, the method's own ``rounds``, or 3 (Flower's default) if that is not set.
        timeout : float, optional
            Seconds until an exchange ends without the missing clients; the method's own ``deadline_s`` if None.
        train_config : ConfigRecord, optional
            Sent to the clients with every request.
        evaluate_config : ConfigRecord, optional
            Not used: clients do not evaluate, `evaluate_fn` does.
        evaluate_fn : callable, optional
            ``(round, model) -> metrics``; called with the initial model as round 0 and after every round.
        parameters : collection of str, optional
            Names of the entries of `initial_arrays` that are trained, as ``dict(model.named_parameters())`` has them.
            None: all float entries but torch's statistics of batch normalisation.

        Returns
        -------
        Result
            Flower's result: the last global model, and metrics by round.

        Raises
        ------
        ConfigError
            If `parameters` has a name that the model has not.
        FederationError
            If no client's reply was accepted in any round: nothing was trained, and the result must not pass for a
            model.
        """
        if num_rounds is None:
            num_rounds = self.federation.rounds if "rounds" in self.federation.model_fields_set else FLOWER_ROUNDS
        deadline = self.federation.deadline_s if timeout is None else timeout
        self.federation = self.federation.model_copy(update={"deadline_s": deadline, "rounds": num_rounds})
        initial = {name: array.numpy() for name, array in initial_arrays.items()}
        self.begin(initial, trained(initial, parameters))
        self.summary()
        result, arrays, lost, taken = Result(), initial_arrays, False, False
        for number in range(num_rounds + 1):
            if number:
                self.run_round(number, grid, dict(train_config or {}))
                result.arrays = arrays = encode(self.global_model())
                result.train_metrics_clientapp[number] = self._metrics()
                lost = lost or bool(self.report.dropped)
                taken = taken or bool(self.report.bytes_up) or self.report.train_loss is not None
            measured = evaluate_fn(number, arrays) if evaluate_fn else None
            if measured is not None:
                result.evaluate_metrics_serverapp[number] = measured
            self._tell(number, num_rounds, measured or {})
        if lost and not taken:  # requests say nothing: a lost slot may have had none, or several
            raise FederationError(
                f"{counted(num_rounds, 'round')} and not one accepted reply: nothing was trained. The warnings above "
                "say why."
            )
        return result

    def _tell(self, number: int, rounds: int, measured: Mapping[str, Any]) -> None:
        """Log a round in one line: what `evaluate_fn` measured, the clients' loss, how many clients were lost."""
        parts = [f"{name} {value:.4g}" for name, value in measured.items() if isinstance(value, int | float)]
        if not number:
            if parts:
                log(INFO, "fedcross: initial model: %s", ", ".join(parts))
            return
        report = self.report
        loss = [] if report.train_loss is None else [f"train-loss {report.train_loss:.4g}"]
        lost = [f"{report.dropped} of {report.clients} clients lost"] if report.dropped else []
        log(INFO, "fedcross: round %d of %d: %s", number, rounds, ", ".join([*parts, *loss, *lost]) or "done")

    def _metrics(self) -> MetricRecord:
        """Return the round's metrics as Flower keeps them."""
        loss = self.report.train_loss
        return MetricRecord({**({} if loss is None else {"train-loss": loss}), **self.report.metrics})

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Open an exchange and return its first requests, for a caller that sends them and collects the replies.

        `server_round` counts exchanges: a method with two exchanges per round is called twice for each round. `arrays`
        is the initial model in the first call and not used later; the method keeps its own state. All float entries
        but torch's statistics of batch normalisation are trained; a caller whose model has other names for these calls
        :meth:`begin` first, with the names of what is trained.

        Notes
        -----
        The exchange is the same as in :meth:`run_round`, with log, spare clients, defence and accounting. The caller
        alone decides when to stop waiting, which has these limits:

        - ``deadline_s`` limits only the requests that :meth:`aggregate_train` itself still sends,
        - ``enough_replies`` does not end the exchange early,
        - failed slots go to spare clients, and requests without a reply are repeated, only in :meth:`aggregate_train`,
        - the log gets the accepted replies only then, not as each one arrives.

        :meth:`start` and :meth:`run_round` have none of these limits.
        """
        if not self.spec:
            initial = {name: array.numpy() for name, array in arrays.items()}
            self.begin(initial, trained(initial))
        number, index = divmod(server_round - 1, self.exchanges)
        clients = self._round.clients if index else self._begin_round(number + 1, grid)
        self._exchange = self._open(Round(number + 1, index, clients, self.federation.seed), grid, dict(config))
        return self._exchange.open()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, send lost slots to spare clients, aggregate; return the global model and the metrics."""
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
