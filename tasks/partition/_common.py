"""Shared by the partitions: the setting for the number of clients, and the final check."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from fedcross.core.errors import DataError
from fedcross.core.settings import Settings
from fedcross.tasks.base import IntArray


class ClientsParams(Settings):
    """Settings of partitions that make clients.

    Attributes
    ----------
    clients : int
        Number of clients N, 1 or more.
    """

    clients: int = Field(ge=1)


def owned(parts: Sequence[IntArray], where: str = "") -> list[IntArray]:
    """Return the clients' index sets, each sorted and read-only.

    Parameters
    ----------
    parts : sequence of int64 arrays
        One per client.
    where : str
        Start of the error message, for example the file.

    Raises
    ------
    DataError
        If a client got none; the message names the first of them.
    """
    empty = [client for client, part in enumerate(parts) if len(part) == 0]
    if empty:
        raise DataError(
            f"{where}client {empty[0]} has no training examples ({len(empty)} of {len(parts)} clients have none). "
            "Use fewer clients, more data or another partition."
        )
    ordered = []
    for part in parts:
        part = part.astype("int64")
        part.sort()
        part.flags.writeable = False
        ordered.append(part)
    return ordered


def enough(examples: int, clients: int, each: int) -> None:
    """Raise :class:`DataError` unless `examples` can give every one of `clients` at least `each`."""
    if clients * each > examples:
        raise DataError(
            f"{clients} clients with at least {each} examples each need {clients * each}, but there are {examples}. "
            "Lower partition.clients or partition.min_size, or raise task.limit."
        )
