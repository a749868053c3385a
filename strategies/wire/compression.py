"""Compression of messages: differences in float16 or int8, with error feedback. The default is exact float32.

Only the float32 parameters of a model are compressed ("coded"). Buffers (a quantised variance could be negative),
integers and a method's extra arrays are sent unchanged.

* **Down** the server sends the difference to the initial model, which both sides make from the seed. It keeps a
  residual e for each *stream*, the successive states of one model: with ``d = model - initial`` it sends
  ``q = Q(d + e)`` and keeps ``e <- d + e - deq(q)``. A slot is a stream, unless the payload names another one: the
  global model beside models of slots, each size of a sliced model. Payloads of one exchange that hold the same arrays
  are coded once, in the stream of the first.
* **Up** a client sends the difference to the *received* (decoded) model, whichever model that is: its stream is what
  it adds. It stores its residual on its disk under the number of the visit, so the residual of a lost upload is never
  used. It therefore answers one request in an exchange.

So over any number of messages of a stream the decoded differences add up to the true ones, up to the last residual
(Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014; Karimireddy et al., Error Feedback Fixes SignSGD,
ICML 2019). A residual of another shape than the next model is dropped.

``int8``: blocks of 1024 values of a tensor share a scale ``s = max|x| / 127``, values are ``rint(x / s)``: 1.004 bytes
for each value of a large tensor. ``float16``: rounded to nearest; the part beyond its range stays in the residual, but
an infinity is sent as it is, so that the guard rejects it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import UploadError
from fedcross.core.settings import Settings
from fedcross.strategies.arrays import Array, Arrays, Spec, spec_of
from fedcross.strategies.wire.protocol import SCALES

Kind = Literal["float32", "float16", "int8"]
#: Number of values that share a scale.
BLOCK = 1024
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


@dataclass(frozen=True)
class Coded:
    """Coded arrays of any number of tensors; `scales` of all of them one after another, empty for float16."""

    arrays: Arrays
    scales: NDArray[np.float32]

    def records(self) -> Arrays:
        """Return the scales as the record that travels; empty if there are none."""
        return {SCALES: self.scales} if self.scales.size else {}


def code(values: Mapping[str, Array], kind: Kind) -> tuple[Coded, Arrays]:
    """Return float32 `values` coded as `kind`, and what they decode to.

    An infinity or NaN decodes to something that is not finite either; with ``int8``, so does its block.
    """
    arrays: Arrays = {}
    scales = []
    decoded: Arrays = {}
    for name in sorted(values):  # the order of the scales, on both sides
        value = values[name]
        if kind == "float16":
            held = np.clip(value, -_LARGEST, _LARGEST)
            arrays[name] = np.where(np.isinf(value), value, held).astype(np.float16)
            decoded[name] = arrays[name].astype(np.float32)
            continue
        flat = np.ascontiguousarray(value).reshape(-1)
        own = _peaks(flat) / np.float32(LEVELS)
        spread = _spread(own, flat.size)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            steps = np.where((spread > 0) & (spread < np.inf), flat / spread, np.float32(0))
            arrays[name] = np.clip(np.rint(steps), -LEVELS, LEVELS).astype(np.int8).reshape(value.shape)
            decoded[name] = (arrays[name].reshape(-1) * spread).reshape(value.shape)
        scales.append(own)
    return Coded(arrays, np.concatenate(scales) if scales else np.zeros(0, np.float32)), decoded


def decode(arrays: Mapping[str, Array], scales: NDArray[np.float32]) -> Arrays:
    """Return the float32 values of coded `arrays`.

    Raises
    ------
    UploadError
        ``malformed_array`` for a negative scale or the value -128, which :func:`code` never produces.
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
            spread = _spread(scales[place : place + count], array.size)
            decoded[name] = (array.reshape(-1) * spread).reshape(array.shape)
        place += count
    return decoded


def blocks(size: int) -> int:
    """Return the number of scales for `size` values."""
    return -(-size // BLOCK)


def _peaks(flat: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return max|x| of each block of `flat`."""
    if not flat.size:
        return np.zeros(0, np.float32)
    return np.maximum.reduceat(np.abs(flat), np.arange(0, flat.size, BLOCK)).astype(np.float32, copy=False)


def _spread(scales: NDArray[np.float32], size: int) -> NDArray[np.float32]:
    """Return the scale of each of `size` values."""
    return np.repeat(scales, BLOCK)[:size]


def codable(names: Iterable[str], reference: Mapping[str, Array], spec: Spec) -> list[str]:
    """Return which of `names` are coded: float32, and in `reference` with the shape that `spec` says."""
    return [n for n in names if n in reference and n in spec and spec[n] == (reference[n].shape, "float32")]


def difference(new: Mapping[str, Array], old: Mapping[str, Array], residual: Arrays, names: Collection[str]) -> Arrays:
    """Return ``new - old + residual`` for `names`; a residual that is missing or of another shape is zero."""
    found: Arrays = {}
    for name in names:
        found[name] = np.subtract(new[name], old[name], dtype=np.float32)
        if name in residual and residual[name].shape == found[name].shape:
            found[name] += residual[name]
    return found


def remainder(wanted: Arrays, decoded: Arrays) -> Arrays:
    """Return ``wanted - decoded``; zero where it is not finite, so that a NaN does not stay in the residual."""
    with np.errstate(invalid="ignore"):
        left = {name: wanted[name] - decoded[name] for name in wanted}
    return {name: np.where(np.isfinite(array), array, np.float32(0)) for name, array in left.items()}


def applied(base: Mapping[str, Array], decoded: Mapping[str, Array]) -> Arrays:
    """Return ``base + decoded`` for the names of `decoded`."""
    with np.errstate(over="ignore"):
        return {name: np.add(base[name], change, dtype=np.float32) for name, change in decoded.items()}


def uncode(arrays: Arrays, scales: Mapping[str, Array], base: Mapping[str, Array]) -> Arrays:
    """Return the model that coded `arrays` (others among them stay as they are) describe against `base`, in order."""
    coded = {name: array for name, array in arrays.items() if name in base and array.dtype in (np.float16, np.int8)}
    made = applied(base, decode(coded, scales.get(SCALES, np.zeros(0, np.float32))))
    return {name: made.get(name, array) for name, array in arrays.items()}


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
        coded, decoded = code(wanted, self.settings.up)
        return {**trained, **coded.arrays}, coded.records(), remainder(wanted, decoded)


def apart(arrays: Mapping[str, Array]) -> tuple[Arrays, Arrays]:
    """Split a client's state: return the objective's arrays, and the residual without its prefix."""
    residual = {name.removeprefix(RESIDUAL): a for name, a in arrays.items() if name.startswith(RESIDUAL)}
    return {name: a for name, a in arrays.items() if not name.startswith(RESIDUAL)}, residual


def marked(residual: Arrays) -> Arrays:
    """Return `residual` with its prefix, so that it can be stored beside other arrays."""
    return {RESIDUAL + name: array for name, array in residual.items()}
