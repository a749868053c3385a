"""Ends a run whose configuration no client can use: the rounds would go on with nobody."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fedcross.core.errors import ConfigError, UploadError
from fedcross.strategies.round.exchange import Exchange

#: How the error of a client begins that cannot work with the run's configuration: its own answer
#: (``protocol.failure``), or what Flower or an engine says when the ClientApp raised it.
CONFIG_ERROR = re.compile(r"client_error: (code \d+: )?ConfigError: ")


def configuration_error(error: UploadError) -> str | None:
    """Return what a client says of the run's configuration; None if its reply was rejected for another reason."""
    told = str(error)
    start = CONFIG_ERROR.match(told)
    return told[start.end() :] if start else None


def end_if_common(faults: Mapping[int, str], exchange: Exchange, connected: int, *, heard: bool) -> None:
    """Raise a ConfigError if every client of `exchange` failed with the same one: no later round could do better.

    Parameters
    ----------
    faults : mapping
        Client -> its configuration error in this exchange.
    exchange : Exchange
        An exchange that no client has answered.
    connected : int
        How many clients are connected.
    heard : bool
        Whether a client has trained with this configuration since this process began. Then this takes the word of most
        connected clients: a few malicious ones, alone in a round, must not end a run.
    """
    asked = {payload.client for payload in exchange.payloads}
    few = heard and 2 * len(faults) <= connected
    if asked and not exchange.inbox.won and asked <= faults.keys() and not few and len(set(faults.values())) == 1:
        fault = next(iter(faults.values()))
        raise ConfigError(f"All {len(asked)} clients of round {exchange.current.number} refuse: {fault}")
