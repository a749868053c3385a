"""The interface of a filter, which stands between every method and the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedcross.strategies.method import Round, Upload
from fedcross.strategies.wire.records import Payload


@dataclass
class Verdict:
    """The uploads of an exchange that count, perhaps as changed copies; the others, each with reason and detail.

    ``counts`` are added to the round's line of metrics.
    """

    uploads: list[Upload]
    refused: list[tuple[Upload, str, str]] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)


class Filter:
    """One step between method and wire; this one changes nothing. No filter knows the method.

    Tasks go through the filters in their order, uploads in the reverse order.
    """

    #: What a checkpoint holds of this filter, such as :mod:`strategies.round.packing` can pack.
    state: Any

    def down(self, round: Round, payloads: list[Payload]) -> list[Payload]:
        """Return what is sent in an exchange. ``payload.received`` says what the client decodes it to.

        A filter that codes replies too sets ``payload.reply`` and ``payload.reply_scales``, which a reply must have.
        """
        return payloads

    def up(self, payload: Payload, upload: Upload) -> Upload:
        """Return a reply's upload decoded; raise an ``UploadError`` if it cannot be."""
        return upload

    def judge(self, round: Round, uploads: list[Upload], payloads: Mapping[int, Payload]) -> Verdict:
        """Return which uploads of an exchange count; `payloads` are by slot. Called once an exchange, at its end."""
        return Verdict(uploads)
