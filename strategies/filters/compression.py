"""Compression of messages: differences in float16 or int8, with error feedback. The default is exact float32.

Only the float32 parameters of a model are compressed ("coded"). Buffers (a quantised variance could be negative),
integers and a method's extra arrays are sent unchanged.

* **Down** the server sends the difference to the initial model, which both sides make from the seed. It keeps a
  residual e for each *stream*, the successive states of one model: with ``d = model - initial`` it sends
  ``q = Q(d + e)`` and keeps ``e <- d + e - deq(q)``. A slot is a stream, unless the task names another one.
* **Up** a client sends the difference to the *received* (decoded) model: its stream is what it adds. It stores its
  residual on its disk under the number of the visit, so the residual of a lost upload is never used. It therefore
  answers one request in an exchange.

So over any number of messages of a stream the decoded differences add up to the true ones, up to the last residual
(Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD,
ICML 2019). A residual of another shape than the next model is dropped.

``int8``: blocks of 1024 values of a tensor share a scale ``s = max|x| / 127``, values are ``rint(x / s)``: 1.004 bytes
for each value of a large tensor. ``float16``: rounded to nearest; the part beyond its range stays in the residual, but
an infinity is sent as it is, so that the guard rejects it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from logging import WARNING
from typing import Literal

import numpy as np
from flwr.common.logger import log
from numpy.typing import NDArray

from fedcross.core.errors import UploadError
from fedcross.core.settings import Settings
from fedcross.strategies.filters.base import Filter
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.wire.protocol import SCALES, Payload
from fedcross.strategies.wire.records import Array, Arrays, Spec, spec_of

Kind = Literal["float32", "float16", "int8"]
BLOCK = 1024  # values that share a scale
LEVELS = 127
#: Prefix of residuals among other arrays of a state: no name of a ``state_dict`` begins with a dot.
RESIDUAL = ".residual."
_LARGEST = float(np.finfo(np.float16).max)


class Compression(Settings):
    """Number format of the models' float32 parameters on the way ``down`` to clients and ``up`` to the server."""

    down: Kind = "float32"
    up: Kind = "float32"

    @property
    def exact(self) -> bool:
        """Whether compression is off in both directions."""
        return self.down == self.up == "float32"


def code(values: Mapping[str, Array], kind: Kind) -> tuple[Arrays, Arrays, Arrays]:
    """Return float32 `values` coded as `kind`, the record with their scales (none for float16), what they decode to.

    An infinity or NaN decodes to something that is not finite either; with ``int8``, so does its block.
    """
    arrays: Arrays = {}
    decoded: Arrays = {}
    scales = []
    for name in sorted(values):  # the order of the scales, on both sides
        value = values[name]
        if kind == "float16":
            arrays[name] = np.where(np.isinf(value), value, np.clip(value, -_LARGEST, _LARGEST)).astype(np.float16)
            decoded[name] = arrays[name].astype(np.float32)
            continue
        flat = np.ascontiguousarray(value).reshape(-1)
        peaks = np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, BLOCK)) if flat.size else flat
        scales.append(peaks / np.float32(LEVELS))
        spread = np.repeat(scales[-1], BLOCK)[: flat.size]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = np.where((spread > 0) & (spread < np.inf), flat / spread, np.float32(0))
            arrays[name] = np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8).reshape(value.shape)
            decoded[name] = (arrays[name].reshape(-1) * spread).reshape(value.shape)
    every = np.concatenate(scales) if scales else np.zeros(0, np.float32)
    return arrays, {SCALES: every} if every.size else {}, decoded


def decode(arrays: Mapping[str, Array], scales: NDArray[np.float32]) -> Arrays:
    """Return the float32 values of coded `arrays`.

    A negative scale or the value -128, which :func:`code` never produces, is an UploadError ``malformed_array``.
    """
    if (scales < 0).any():
        raise UploadError("malformed_array", "a negative scale")
    decoded: Arrays = {}
    place = 0
    for name in sorted(arrays):
        array = arrays[name]
        if array.dtype == np.float16:
            decoded[name] = array.astype(np.float32)
            continue
        if array.size and array.min() < -LEVELS:
            raise UploadError("malformed_array", f"{name}: a value outside of -127 to 127")
        count = blocks(array.size)
        with np.errstate(over="ignore", invalid="ignore"):
            spread = np.repeat(scales[place : place + count], BLOCK)[: array.size]
            decoded[name] = (array.reshape(-1) * spread).reshape(array.shape)
        place += count
    return decoded


def blocks(size: int) -> int:
    """Return the number of scales of `size` values."""
    return -(-size // BLOCK)


def codable(names: Iterable[str], reference: Mapping[str, Array], spec: Spec) -> list[str]:
    """Return which of `names` are coded: float32, and in `reference` with the shape that `spec` says."""
    return [n for n in names if n in reference and n in spec and spec[n] == (reference[n].shape, "float32")]


def difference(new: Mapping[str, Array], old: Mapping[str, Array], residual: Arrays, names: Collection[str]) -> Arrays:
    """Return ``new - old + residual`` for `names`; a residual that is missing or of another shape is zero."""
    found = {name: np.subtract(new[name], old[name], dtype=np.float32) for name in names}
    same = [name for name in names if name in residual and residual[name].shape == found[name].shape]
    return found | {name: found[name] + residual[name] for name in same}


def remainder(wanted: Arrays, decoded: Arrays) -> Arrays:
    """Return ``wanted - decoded``; zero where it is not finite, so that a NaN does not stay in the residual."""
    with np.errstate(invalid="ignore"):
        return {name: np.nan_to_num(wanted[name] - decoded[name], nan=0, posinf=0, neginf=0) for name in wanted}


def uncode(arrays: Arrays, scales: Mapping[str, Array], base: Mapping[str, Array]) -> Arrays:
    """Return the model that coded `arrays` (others among them stay as they are) describe against `base`, in order."""
    coded = {name: array for name, array in arrays.items() if name in base and array.dtype in (np.float16, np.int8)}
    changes = decode(coded, scales.get(SCALES, np.zeros(0, np.float32)))
    with np.errstate(over="ignore"):
        return {name: base[name] + changes[name] if name in changes else array for name, array in arrays.items()}


class ClientHalf:
    """The client's part of compression; `initial` is the model made from the run's seed."""

    def __init__(self, settings: Compression, initial: Mapping[str, Array]) -> None:
        self.settings = settings
        self.initial = {name: np.array(a) for name, a in initial.items() if a.dtype == np.float32}

    def received(self, arrays: Arrays, scales: Mapping[str, Array]) -> Arrays:
        """Return the model decoded from `arrays` and `scales`."""
        return arrays if self.settings.down == "float32" else uncode(arrays, scales, self.initial)

    def upload(self, trained: Arrays, received: Arrays, residual: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Return arrays and scales to send for the model `trained`, and the residual to keep."""
        base = {name: received[name] for name in self.initial if name in received}
        wanted = difference(trained, base, residual, codable(trained, base, spec_of(trained)))
        coded, scales, decoded = code(wanted, self.settings.up)
        return {**trained, **coded}, scales, remainder(wanted, decoded)


def apart(arrays: Mapping[str, Array]) -> tuple[Arrays, Arrays]:
    """Split a client's state: return the objective's arrays, and the residual without its prefix."""
    residual = {name.removeprefix(RESIDUAL): a for name, a in arrays.items() if name.startswith(RESIDUAL)}
    return {name: a for name, a in arrays.items() if not name.startswith(RESIDUAL)}, residual


def marked(residual: Arrays) -> Arrays:
    """Return `residual` with its prefix, so that it can be stored beside other arrays."""
    return {RESIDUAL + name: array for name, array in residual.items()}


@dataclass
class CompressionState:
    """Stream -> the coding error to add to the next difference; a slot's own stream has its number as name."""

    residuals: dict[str, Arrays] = field(default_factory=dict)


class CompressionFilter(Filter):
    """The server's part: codes models that go down, and decodes uploads."""

    def __init__(self, settings: Compression, start: Start) -> None:
        known = {name: start.arrays[name] for name in start.parameters}
        self.settings, self._corners, self.state = settings, start.corners, CompressionState()
        self.initial = {name: np.array(a) for name, a in known.items() if a.dtype == np.float32}
        if known and not self.initial:
            log(
                WARNING,
                "fedcross: compression codes float32 alone; this model is %s.",
                next(iter(known.values())).dtype,
            )

    def down(self, round: Round, payloads: list[Payload]) -> list[Payload]:
        """Return the coded payloads; those that hold the same arrays are coded once, in the stream of the first."""
        found, coded = [], dict[int, Payload]()
        for payload in payloads:
            if id(payload.arrays) not in coded:
                coded[id(payload.arrays)] = self._coded(payload)
            known = coded[id(payload.arrays)]
            model, scales = self._expected(payload.model, known.received)
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
        coded, scales, decoded = code(wanted, self.settings.down)
        self.state.residuals[stream] = remainder(wanted, decoded)
        arrays = {**model, **coded}
        return replace(payload, arrays=arrays, scales=scales, received=uncode(arrays, scales, initial))

    def _expected(self, model: Spec, received: Arrays) -> tuple[Spec, Spec]:
        """Return the specs of an upload's arrays and scales, for a difference to `received`."""
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
