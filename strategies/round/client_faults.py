"""Ends a run whose configuration no client can use: the rounds would go on with nobody."""

from __future__ import annotations

import re
from collections.abc import Collection

from fedcross.core.errors import ConfigError, UploadError
from fedcross.strategies.round.exchange import Exchange

#: How the error of a client begins that cannot work with the run's configuration: its own answer
#: (``protocol.failure``), or what Flower or an engine says when the ClientApp raised it.
CONFIG_ERROR = re.compile(r"client_error: (code \d+: )?ConfigError: ")


class ClientFaults:
    """The configuration errors of one exchange's clients."""

    def __init__(self) -> None:
        self._found: dict[int, str] = {}
        self._heard = False  # whether a client has trained since this process began

    def begin(self) -> None:
        """Forget the exchange before."""
        self._found = {}

    def note(self, client: int | None, error: UploadError) -> None:
        """Note why a reply of `client` was rejected."""
        told = str(error)
        if client is not None and (start := CONFIG_ERROR.match(told)):
            self._found[client] = told[start.end() :]

    def check(self, exchange: Exchange, connected: int) -> None:
        """Raise a ConfigError if every client of `exchange` failed with the same one: no later round could do better.

        Once a client has trained with this configuration, this takes the word of most of the `connected` clients: a few
        malicious ones, alone in a round, must not end a run.
        """
        self._heard = self._heard or len(exchange.inbox.won) > exchange.inherited
        asked = {payload.client for payload in exchange.payloads}
        self.judge(asked, bool(exchange.inbox.won), connected, exchange.current.number)

    def heard(self) -> None:
        """Note that a client has trained since this process began."""
        self._heard = True

    def judge(self, asked: Collection[int], answered: bool, connected: int, number: int) -> None:
        """Do the same for the clients `asked` in round `number`; `answered`: whether an upload was accepted."""
        few = self._heard and 2 * len(self._found) <= connected
        if not asked or answered or not set(asked) <= self._found.keys() or few:
            return
        faults = set(self._found.values())
        if len(faults) == 1:
            raise ConfigError(f"All {len(asked)} clients of round {number} refuse: {faults.pop()}")
