"""One model as one row of numbers: the position of each entry of a ``state_dict``, and views of a row as a model.

A pool of K models is a (K, d) buffer whose row is laid out as::

    | parameters, in state_dict order (p values) | float buffers, in state_dict order (d - p) |

Integer entries (batch counters) lie in a second row of int64, so that no counter ever passes through a float.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedcross.core.errors import ConfigError, UploadError

Array: TypeAlias = NDArray[Any]
Arrays: TypeAlias = dict[str, Array]
"""A model's ``state_dict`` as numpy arrays, in its order."""


@dataclass(frozen=True)
class Entry:
    """Position of one entry of the ``state_dict`` in a row.

    Parameters
    ----------
    name, shape, dtype
        As in the model.
    start : int
        Index of its first value in the float row or, if `is_integer`, in the integer row.
    is_parameter : bool
        Whether it is trained; False for buffers and for all integer entries.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    is_parameter: bool

    @property
    def is_integer(self) -> bool:
        """Whether the entry lies in the integer row (bool counts as integer)."""
        return self.dtype.kind in "iub"

    @property
    def stop(self) -> int:
        """Index after its last value."""
        return self.start + prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """The order of a model's values in a row; :meth:`of` creates it.

    Parameters
    ----------
    entries : tuple of Entry
        In ``state_dict`` order.
    dtype : numpy dtype
        Of every float entry: float32 or float64.
    size : int
        d, float values of one model.
    parameter_size : int
        p, how many of them are parameters; they come first.
    integer_size : int
        Integer values of one model.
    """

    entries: tuple[Entry, ...]
    dtype: np.dtype[Any]
    size: int
    parameter_size: int
    integer_size: int

    @classmethod
    def of(cls, arrays: Mapping[str, Array], parameters: Collection[str] | None = None) -> Layout:
        """Lay out a model.

        Parameters
        ----------
        arrays : mapping of str to array
            The model, in ``state_dict`` order.
        parameters : collection of str, optional
            Names of the trained entries; None means that every float entry counts as one.

        Raises
        ------
        ConfigError
            If there is no float entry, a dtype is not supported, float dtypes differ, or `parameters` names
            something that is not a float entry.
        """
        faults = _dtype_faults(arrays)
        floats = [name for name, array in arrays.items() if array.dtype.kind == "f"]
        trained = set(floats if parameters is None else parameters)
        faults += [
            f"parameter {name!r} is no float entry of the model. Give names of the state_dict."
            for name in sorted(trained - set(floats))
        ]
        if not floats:
            faults.append(f"the model has no float entry, only {sorted(arrays)}. Give a model with weights.")
        if faults:
            raise ConfigError(faults)

        starts: dict[str, int] = {}
        position = parameter_size = 0
        for name in sorted(floats, key=lambda name: name not in trained):  # stable: the order of the state_dict stays
            starts[name] = position
            position += arrays[name].size
            parameter_size += arrays[name].size if name in trained else 0
        integer_size = 0
        for name in [name for name in arrays if name not in starts]:
            starts[name] = integer_size
            integer_size += arrays[name].size
        entries = tuple(
            Entry(name, array.shape, array.dtype, starts[name], name in trained) for name, array in arrays.items()
        )
        return cls(entries, arrays[floats[0]].dtype, position, parameter_size, integer_size)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Names of all entries in ``state_dict`` order."""
        return tuple(entry.name for entry in self.entries)

    @cached_property
    def spec(self) -> Mapping[str, tuple[tuple[int, ...], str]]:
        """Required names, shapes and dtypes of an upload: name -> (shape, dtype's name), in order, read-only."""
        return MappingProxyType({entry.name: (entry.shape, str(entry.dtype)) for entry in self.entries})

    def columns(self, part: str) -> slice:
        """Return the columns of ``"parameters"`` or of the whole ``"state"`` in the float row."""
        return slice(0, {"parameters": self.parameter_size, "state": self.size}[part])

    def views(self, row: Array, integers: NDArray[np.int64]) -> Arrays:
        """Return the model in a row as views, without copying, in ``state_dict`` order.

        Only integer entries of another dtype than int64 are copied, because they must be converted.

        Parameters
        ----------
        row : array (d,)
            Contiguous; writing into a view writes here.
        integers : int64 array
            The model's integer entries.
        """
        model: Arrays = {}
        for entry in self.entries:
            part = (integers if entry.is_integer else row)[entry.start : entry.stop].reshape(entry.shape)
            model[entry.name] = part.astype(entry.dtype, copy=False)
        return model

    def write(self, arrays: Mapping[str, Array], row: Array, integers: NDArray[np.int64]) -> None:
        """Copy a model into a row; if any entry does not fit, nothing is written.

        Raises
        ------
        UploadError
            If names, a shape or a dtype differ from the layout (``wrong_names``, ``wrong_shape``, ``wrong_dtype``).
        """
        self.check(arrays)
        for entry in self.entries:
            part = (integers if entry.is_integer else row)[entry.start : entry.stop]
            part[...] = arrays[entry.name].reshape(-1)

    def check(self, arrays: Mapping[str, Array]) -> None:
        """Raise UploadError, as :meth:`write` does, unless `arrays` has this layout's names, shapes and dtypes."""
        if tuple(arrays) != self.names and set(arrays) != set(self.names):
            missing, extra = sorted(set(self.names) - set(arrays)), sorted(set(arrays) - set(self.names))
            raise UploadError("wrong_names", f"missing {missing}, not known {extra}")
        for name, (shape, dtype) in self.spec.items():
            if arrays[name].shape != shape:
                raise UploadError("wrong_shape", f"{name} has shape {arrays[name].shape}, expected {shape}")
            if str(arrays[name].dtype) != dtype:
                raise UploadError("wrong_dtype", f"{name} has dtype {arrays[name].dtype}, expected {dtype}")


def _dtype_faults(arrays: Mapping[str, Array]) -> list[str]:
    faults: list[str] = []
    floats: dict[np.dtype[Any], str] = {}
    for name, array in arrays.items():
        if array.dtype in (np.float32, np.float64):
            floats.setdefault(array.dtype, name)
        elif array.dtype.kind not in "iub" or array.dtype == np.uint64:
            faults.append(
                f"entry {name!r} has dtype {array.dtype}. Use float32, float64, bool or integers that fit int64."
            )
    if len(floats) > 1:
        seen = ", ".join(f"{dtype} ({name!r})" for dtype, name in floats.items())
        faults.append(f"the model mixes float dtypes: {seen}. Use one of them for all float entries.")
    return faults
