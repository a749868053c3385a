"""Shared by the partitions: settings, draws until everybody has enough, and the final check."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.settings import Settings
from fedcross.tasks.base import IntArray, Partition


class ClientsParams(Settings):
    """Settings of partitions that make clients: their number N, 1 or more."""

    clients: int = Field(ge=1)


class DrawParams(ClientsParams):
    """Settings of partitions that are drawn until every client has enough.

    Attributes
    ----------
    beta : float
        Concentration of the Dirichlet distribution, above 0: small is skewed, large is even.
    min_size, max_draws : int
        Smallest number of examples of a client; draws of the whole partition before it gives up.
    """

    beta: float = Field(default=0.5, gt=0)
    min_size: int = Field(default=10, ge=1)
    max_draws: int = Field(default=1000, ge=1)


def drawn(params: DrawParams, examples: int, draw: Callable[[int], Sequence[IntArray]]) -> Partition:
    """Return the first of ``draw(0)``, ``draw(1)``, ... in which every client has ``min_size`` examples."""
    enough(examples, params.clients, params.min_size)
    best = 0
    for attempt in range(params.max_draws):
        parts = draw(attempt)
        smallest = min(map(len, parts), default=0)
        if smallest >= params.min_size:
            return Partition(train=owned(parts))
        best = max(best, smallest)
    what = f"partition of {examples} examples over {params.clients} clients with at least {params.min_size} each"
    cure = "Lower partition.clients or partition.min_size, or raise partition.beta."
    raise DataError(f"{params.max_draws} draws with beta={params.beta} gave no {what} (best: {best}). {cure}")


def owned(parts: Sequence[IntArray], where: str = "") -> list[IntArray]:
    """Return the clients' index sets, sorted and read-only; a DataError, begun by `where`, if one is empty."""
    if empty := [client for client, part in enumerate(parts) if len(part) == 0]:
        none = f"client {empty[0]} has no training examples ({len(empty)} of {len(parts)} clients have none)"
        raise DataError(f"{where}{none}. Use fewer clients, more data or another partition.")
    ordered = [part.astype("int64") for part in parts]
    for part in ordered:
        part.sort()
        part.flags.writeable = False
    return ordered


def enough(examples: int, clients: int, each: int) -> None:
    """Raise :class:`DataError` unless `examples` can give every one of `clients` at least `each`."""
    if clients * each > examples:
        need = f"{clients} clients with at least {each} examples each need {clients * each}, but there are {examples}"
        raise DataError(f"{need}. Lower partition.clients or partition.min_size, or raise task.limit.")
