"""Compression of messages: differences in float16 or int8, with error feedback. The default is exact float32.

Only the float32 parameters of a model are coded; buffers, integers and a method's extra arrays travel unchanged.

* **Down** the server sends the difference to the initial model, which both sides make from the seed. It keeps a
  residual e for each *stream*, the successive states of one model: with ``d = model - initial`` it sends
  ``q = Q(d + e)`` and keeps ``e <- d + e - deq(q)``. A slot is a stream, unless the task names another one.
* **Up** a client sends the difference to the *received* (decoded) model. It stores its residual on its disk under the
  number of the visit, so the residual of a lost upload is never used; it answers one request in an exchange.

So the decoded differences of a stream add up to the true ones, up to the last residual (Seide et al., 1-Bit SGD,
Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019).

``int8``: blocks of 1024 values of a tensor share a scale ``s = max|x| / 127``, values are ``rint(x / s)``.
``float16``: rounded to nearest; the part beyond its range stays in the residual.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from logging import WARNING
from typing import Literal

import numpy as np
from flwr.common.logger import log

from fedcross.core.errors import UploadError
from fedcross.core.settings import Settings
from fedcross.strategies.filters.base import Filter
from fedcross.strategies.method import Round, Start, Upload
from fedcross.strategies.wire.records import SCALES, Array, Arrays, Payload, Spec, spec_of

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


def code(values: Mapping[str, Array], kind: Kind) -> tuple[Arrays, Arrays]:
    """Return float32 `values` coded as `kind`, and the record with their scales, by name (none for float16).

    An infinity or NaN decodes to something that is not finite either; with ``int8``, so does its block.
    """
    if kind == "float16":
        cut = {n: np.where(np.isinf(v), v, np.clip(v, -_LARGEST, _LARGEST)) for n, v in values.items()}
        return {name: array.astype(np.float16) for name, array in cut.items()}, {}
    arrays, scales = Arrays(), list[Array]([np.zeros(0, np.float32)])
    for name in sorted(values):
        flat = np.ascontiguousarray(values[name]).reshape(-1)
        peaks = np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, BLOCK)) if flat.size else flat
        scales.append(peaks / np.float32(LEVELS))
        spread = np.repeat(scales[-1], BLOCK)[: flat.size]
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = np.where((spread > 0) & (spread < np.inf), flat / spread, np.float32(0))
            arrays[name] = np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8).reshape(values[name].shape)
    every = np.concatenate(scales)
    return arrays, {SCALES: every} if every.size else {}


def decode(arrays: Mapping[str, Array], scales: Mapping[str, Array]) -> Arrays:
    """Return the float32 values of coded `arrays`; `scales` is the record that :func:`code` returned.

    A negative scale or the value -128, which :func:`code` never produces, is an UploadError ``malformed_array``.
    """
    left = scales.get(SCALES, np.zeros(0, np.float32))
    if (left < 0).any():
        raise UploadError("malformed_array", "a negative scale")
    decoded: Arrays = {}
    for name in sorted(arrays):
        array = arrays[name]
        if array.dtype == np.float16:
            decoded[name] = array.astype(np.float32)
            continue
        if array.size and array.min() < -LEVELS:
            raise UploadError("malformed_array", f"{name}: a value outside of -127 to 127")
        own, left = np.split(left, [-(-array.size // BLOCK)])
        with np.errstate(over="ignore", invalid="ignore"):
            decoded[name] = (array.reshape(-1) * np.repeat(own, BLOCK)[: array.size]).reshape(array.shape)
    return decoded


def codable(spec: Spec, base: Mapping[str, Array]) -> list[str]:
    """Return which entries of a model of `spec` are coded: float32, and in `base` with the same shape."""
    return [name for name in spec if name in base and spec[name] == (base[name].shape, "float32")]


def compressed(model: Arrays, base: Mapping[str, Array], residual: Arrays, kind: Kind) -> tuple[Arrays, Arrays, Arrays]:
    """Return `model` with its difference to `base`, plus `residual`, coded; the record of scales; the next residual.

    A residual that is missing or of another shape is zero; where it would not be finite, it is zero too.
    """
    wanted = {n: np.subtract(model[n], base[n], dtype=np.float32) for n in codable(spec_of(model), base)}
    same = [name for name in wanted if name in residual and residual[name].shape == wanted[name].shape]
    wanted |= {name: wanted[name] + residual[name] for name in same}
    arrays, scales = code(wanted, kind)
    decoded = decode(arrays, scales)
    with np.errstate(invalid="ignore"):
        rest = {n: np.nan_to_num(wanted[n] - decoded[n], nan=0, posinf=0, neginf=0) for n in wanted}
    return {**model, **arrays}, scales, rest


def restored(arrays: Arrays, scales: Mapping[str, Array], base: Mapping[str, Array]) -> Arrays:
    """Return the model that coded `arrays` (others among them stay as they are) describe against `base`, in order."""
    coded = {name: array for name, array in arrays.items() if name in base and array.dtype in (np.float16, np.int8)}
    changes = decode(coded, scales)
    with np.errstate(over="ignore"):
        return {name: base[name] + changes[name] if name in changes else array for name, array in arrays.items()}


class ClientHalf:
    """The client's part of compression; `initial` is the model made from the run's seed."""

    def __init__(self, settings: Compression, initial: Mapping[str, Array]) -> None:
        self.settings = settings
        self.initial = {name: np.array(a) for name, a in initial.items() if a.dtype == np.float32}

    def received(self, arrays: Arrays, scales: Mapping[str, Array]) -> Arrays:
        """Return the model decoded from `arrays` and `scales`."""
        return arrays if self.settings.down == "float32" else restored(arrays, scales, self.initial)

    def upload(self, trained: Arrays, received: Arrays, residual: Arrays) -> tuple[Arrays, Arrays, Arrays]:
        """Return arrays and scales to send for the model `trained`, and the residual to keep."""
        base = {name: received[name] for name in self.initial if name in received}
        return compressed(trained, base, residual, self.settings.up)


def apart(arrays: Mapping[str, Array]) -> tuple[Arrays, Arrays]:
    """Split a client's state: return the objective's arrays, and the residual without its prefix."""
    residual = {name.removeprefix(RESIDUAL): a for name, a in arrays.items() if name.startswith(RESIDUAL)}
    return {name: a for name, a in arrays.items() if not name.startswith(RESIDUAL)}, residual


def marked(residual: Arrays) -> Arrays:
    """Return `residual` with its prefix, so that it can be stored beside other arrays."""
    return {RESIDUAL + name: array for name, array in residual.items()}


class CompressionFilter(Filter):
    """The server's part: codes models that go down, and decodes uploads.

    ``state``: stream -> the residual to add to its next difference; a slot's own stream has its number as name.
    """

    def __init__(self, settings: Compression, start: Start) -> None:
        known = {name: start.arrays[name] for name in start.parameters}
        self.settings, self._corners, self.state = settings, start.corners, dict[str, Arrays]()
        self.initial = {name: np.array(a) for name, a in known.items() if a.dtype == np.float32}
        if known and not self.initial:
            kind = next(iter(known.values())).dtype
            log(WARNING, "fedcross: compression codes float32 alone; this model is %s.", kind)

    def down(self, round: Round, payloads: list[Payload]) -> list[Payload]:
        """Return the coded payloads; those that hold the same arrays are coded once, in the stream of the first."""
        found, coded = [], dict[int, Payload]()
        for payload in payloads:
            if id(payload.arrays) not in coded:
                coded[id(payload.arrays)] = self._coded(payload)
            known = coded[id(payload.arrays)]
            one = replace(payload, arrays=known.arrays, scales=known.scales, received=known.received)
            found.append(self._expecting(one))
        return found

    def _coded(self, payload: Payload) -> Payload:
        if self.settings.down == "float32":
            return payload
        task, base = payload.task, self.initial
        if self._corners is not None and task.width.ratio < 1:
            base = self._corners.corner(base, task.width)
        stream = task.stream or str(task.slot)
        residual = self.state.get(stream, {})
        arrays, scales, self.state[stream] = compressed(payload.arrays, base, residual, self.settings.down)
        return replace(payload, arrays=arrays, scales=scales, received=restored(arrays, scales, base))

    def _expecting(self, payload: Payload) -> Payload:
        """Return `payload` with the specs of an upload's arrays and scales, for a difference to what was received."""
        if self.settings.up == "float32":
            return payload
        model = payload.model
        reply = {name: (model[name][0], self.settings.up) for name in codable(model, self._base(payload))}
        sizes = [math.prod(shape) for shape, _ in reply.values()] if self.settings.up == "int8" else []
        count = sum(-(-size // BLOCK) for size in sizes)
        return replace(payload, reply=reply, reply_scales={SCALES: ((count,), "float32")} if count else {})

    def up(self, payload: Payload, upload: Upload) -> Upload:
        """Return `upload` decoded; an UploadError ``malformed_array`` or ``non_finite`` if it cannot be."""
        if self.settings.up == "float32":
            return upload
        arrays = restored(upload.arrays, upload.scales, self._base(payload))
        if bad := [name for name, array in arrays.items() if array.dtype.kind == "f" and not np.isfinite(array).all()]:
            raise UploadError("non_finite", f"{bad[0]} decodes to NaN or infinity")
        return replace(upload, arrays=arrays, scales={})

    def _base(self, payload: Payload) -> Arrays:
        return {name: payload.received[name] for name in self.initial if name in payload.received}
