"""The server's part of compression, as a filter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from logging import WARNING

import numpy as np
from flwr.common.logger import log

from fedcross.core.errors import UploadError
from fedcross.strategies.arrays import Arrays, Spec, spec_of
from fedcross.strategies.filters.base import Verdict
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.wire.compression import (
    Compression,
    applied,
    blocks,
    codable,
    code,
    difference,
    remainder,
    uncode,
)
from fedcross.strategies.wire.protocol import SCALES, Payload


@dataclass
class CompressionState:
    """Stream -> the coding error to add to the next difference; a slot's own stream has its number as name."""

    residuals: dict[str, Arrays] = field(default_factory=dict)


class CompressionFilter:
    """Codes models that go down, and decodes uploads. Only float32 parameters are coded."""

    def __init__(self, settings: Compression, start: Start) -> None:
        known = {name: start.arrays[name] for name in start.parameters}
        self.settings, self._corners, self.state = settings, start.corners, CompressionState()
        self.initial = {name: np.array(a) for name, a in known.items() if a.dtype == np.float32}
        if known and not self.initial:
            log(
                WARNING, "fedcross: compression codes float32 alone, and this model is %s, so it is sent as it is. "
                "Build the network in float32, or leave compression out.", next(iter(known.values())).dtype,
            )  # fmt: skip

    def down(self, round: Round, payloads: list[Payload]) -> list[Payload]:
        """Return the coded payloads; those that hold the same arrays are coded once, in the stream of the first."""
        found, coded = [], dict[int, Payload]()
        for payload in payloads:
            if id(payload.arrays) not in coded:
                coded[id(payload.arrays)] = self._coded(payload)
            known = coded[id(payload.arrays)]
            model, scales = self.expected(payload.model, known.received)
            one = replace(payload, arrays=known.arrays, scales=known.scales, received=known.received)
            found.append(replace(one, model=model, model_scales=scales))
        return found

    def _coded(self, payload: Payload) -> Payload:
        if self.settings.down == "float32":
            return payload
        model, task, initial = payload.arrays, payload.task, self.initial
        if self._corners is not None and task.width.ratio < 1:
            initial = self._corners.corner(initial, task.width)
        names, stream = codable(model, initial, spec_of(model)), task.stream or str(task.slot)
        wanted = difference(model, initial, self.state.residuals.get(stream, {}), names)
        coded, decoded = code(wanted, self.settings.down)
        self.state.residuals[stream] = remainder(wanted, decoded)
        received = {**model, **applied(initial, decoded)}
        return replace(payload, arrays={**model, **coded.arrays}, scales=coded.records(), received=received)

    def expected(self, model: Spec, received: Arrays) -> tuple[Spec, Spec]:
        """Return the specs of an upload's arrays and scales, for an upload coded as a difference to `received`."""
        if self.settings.up == "float32":
            return model, {}
        names = set(codable(model, self._base(received), model))
        spec = {n: (shape, self.settings.up if n in names else dtype) for n, (shape, dtype) in model.items()}
        count = sum(blocks(math.prod(model[name][0])) for name in names)
        return spec, {SCALES: ((count,), "float32")} if count and self.settings.up == "int8" else {}

    def up(self, payload: Payload, upload: Upload) -> Upload:
        """Return `upload` decoded; an UploadError ``malformed_array`` or ``non_finite`` if it cannot be."""
        if self.settings.up == "float32":
            return upload
        arrays = uncode(upload.arrays, upload.scales, self._base(payload.received))
        if bad := [name for name, array in arrays.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]:
            raise UploadError("non_finite", f"{bad[0]} decodes to NaN or infinity")
        return replace(upload, arrays=arrays, scales={})

    def _base(self, received: Arrays) -> Arrays:
        return {name: received[name] for name in self.initial if name in received}

    def judge(self, round: Round, uploads: list[Upload], payloads: Mapping[int, Payload]) -> Verdict:
        """Accept all."""
        return Verdict(uploads)
