"""The loops of :mod:`tasks.models.pooling`, compiled with numba at their first call; importing it imports numba."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from fedcross.tasks.compiled_loops import compiled

LANES = 8
"""Float32 numbers that are multiplied at once. Runs of numbers are padded to a multiple of it."""

_word = numba.uintp


def _pool(x: NDArray[Any], out: NDArray[Any], index: NDArray[np.int64]) -> None:
    """Write the largest value of each 2x2 window of `x` (n, h, w, c), to `out`, without NaN.

    `index` gets ``row * w + column`` of the value in its picture; of equal values the first, as torch.
    """
    n, h, w, c = x.shape
    for i in range(n):
        for row in range(h // 2):
            upper, lower, values, places = x[i, 2 * row], x[i, 2 * row + 1], out[i, row], index[i, row]
            for column in range(w // 2):
                left = 2 * column
                place = 2 * row * w + left
                for k in range(c):
                    best, where = upper[left, k], place
                    v = upper[left + 1, k]
                    if v > best:
                        best, where = v, place + 1
                    v = lower[left, k]
                    if v > best:
                        best, where = v, place + w
                    v = lower[left + 1, k]
                    if v > best:
                        best, where = v, place + w + 1
                    values[column, k] = best
                    places[column, k] = where


pool = compiled(_pool)


def _add_runs(_: Any, to: Any, what: Any, factor: Any, runs: Any, vectors: Any, to_step: Any, step: Any) -> Any:  # noqa: ARG001
    """Return numba's signature and code of ``to[r] += factor * what[r]`` for `runs` runs of ``vectors * LANES`` floats.

    `to` and `what` are addresses, `to_step` and `step` the bytes from one run to the next. Written for LLVM: numba
    would check each short run for overlap. The product is rounded before it is added, so all processors agree.
    """
    signature = numba.void(_word, _word, numba.float32, _word, _word, _word, _word)

    def code(context: Any, build: Any, _: Any, given: Any) -> Any:
        to, what, factor, runs, vectors, to_step, step = given
        kind = ir.VectorType(ir.FloatType(), LANES)
        factors = ir.Constant(kind, ir.Undefined)
        for lane in range(LANES):
            factors = build.insert_element(factors, factor, ir.Constant(ir.IntType(32), lane))
        size = ir.Constant(to.type, LANES * 4)
        with cgutils.for_range(build, runs) as run:
            target, source = (build.add(at, build.mul(run.index, by)) for at, by in ((to, to_step), (what, step)))
            with cgutils.for_range(build, vectors) as vector:
                places = [build.add(at, build.mul(vector.index, size)) for at in (target, source)]
                here, there = (build.inttoptr(place, kind.as_pointer()) for place in places)
                old, new = build.load(here, align=4), build.load(there, align=4)
                build.store(build.fadd(old, build.fmul(factors, new)), here, align=4)
        return context.get_dummy_value()

    return signature, code


_runs: Any = intrinsic(_add_runs)


def _places(index: NDArray[np.int64], columns: int, row: int, column: int, out: NDArray[np.int32]) -> None:
    """Write for each `index` of a pooled picture with `columns` columns ``its row * row + its column * column``."""
    wide, by, each = np.uint32(columns), np.uint32(row), np.uint32(column)
    for i in range(len(index)):
        place = np.uint32(index[i])
        line = place // wide
        out[i] = line * by + (place - line * wide) * each


def _patches(
    gradient: NDArray[np.float32], places: NDArray[np.int32], pixels: NDArray[np.float32], kernels: NDArray[np.float32],
    image: int, row: int, to_pixels: bool,
) -> None:  # fmt: skip
    """Add to a convolution's kernels the patches of its input, or to the input's the kernels, times `gradient`.

    Parameters
    ----------
    gradient : float32 array (n, windows, channels)
        Of the pool's output.
    places : int32 array, of that size
        Where in its picture the patch of the window's largest value begins.
    pixels : float32 array, flat
        The pictures, each `image` numbers, each row of pixels `row` numbers, and ``kernels.shape[2]`` more at the end.
    kernels : float32 array (channels, kernel rows, run)
        Run is a multiple of LANES; beyond the kernel's columns there are zeros, or sums that are not to be read.
    to_pixels : bool
        Whether `pixels` get the gradient of the input, from weights in `kernels`; else these get that of the weights.
    """
    n, windows, channels = gradient.shape
    _, high, run = kernels.shape
    first, own = _word(pixels.ctypes.data), _word(kernels.ctypes.data)
    vectors, step, line = _word(run // LANES), _word(run * 4), _word(row * 4)
    for i in range(n):
        for c in range(channels):
            kernel = own + _word(c * high) * step
            for k in range(windows):
                g = gradient[i, k, c]
                if g != 0:
                    patch = first + _word(i * image + places[(i * windows + k) * channels + c]) * _word(4)
                    if to_pixels:
                        _runs(patch, kernel, g, _word(high), vectors, line, step)
                    else:
                        _runs(kernel, patch, g, _word(high), vectors, step, line)


places = compiled(_places)
patches = compiled(_patches)
