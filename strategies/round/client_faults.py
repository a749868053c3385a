"""Ends a run whose configuration no client can use: the rounds would go on with nobody."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from fedcross.core.errors import ConfigError, UploadError, one_line

#: Most characters of a device's words that end a run.
LONGEST = 300
#: What clients have said of the run's configuration: client, round, words.
Said = set[tuple[int, int, str]]
#: How the error of a client begins that cannot work with the run's configuration: its own answer
#: (``protocol.failure``), or what Flower or an engine says when the ClientApp raised it.
CONFIG_ERROR = re.compile(r"client_error: (code \d+: )?ConfigError: ")


def configuration_error(error: UploadError) -> str | None:
    """Return what a client says of the run's configuration; None if its reply was rejected for another reason."""
    told = str(error)
    start = CONFIG_ERROR.match(told)
    return told[start.end() :] if start else None


def end_if_common(
    faults: Mapping[int, str], asked: Collection[int], number: int, connected: int, *, heard: bool, said: Said
) -> None:
    """Raise a ConfigError if all clients that were asked failed with the same one: no later round could do better.

    One client's word is not enough, where a round asks one only: a second one, or a second round, must confirm it.

    Parameters
    ----------
    faults : mapping
        Client -> its configuration error.
    asked : collection of int
        The clients of an exchange (or of a round of visits) of which none has answered.
    number : int
        The round.
    connected : int
        How many clients are connected.
    heard : bool
        Whether a client has trained with this configuration since this process began. Then this takes the word of most
        connected clients: a few malicious ones, alone in a round, must not end a run.
    said : set
        What was said in earlier rounds without an answer; `faults` are added.
    """
    said |= {(client, number, words) for client, words in faults.items()}
    few = heard and 2 * len(faults) <= connected
    if asked and set(asked) <= faults.keys() and not few and len(set(faults.values())) == 1:
        fault = next(iter(faults.values()))
        if sum(words == fault for *_, words in said) >= 2:
            words = one_line(fault)[:LONGEST]
            raise ConfigError(f"All {len(asked)} clients of round {number} refuse: {words} (their devices' words)")
