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

LANES = 16
"""Float32 numbers that are multiplied at once. Runs of numbers are padded to a multiple of it."""

BLOCKS = 5
"""Vectors of LANES numbers that are summed at once, in registers."""

_word = numba.uintp
_alloca: Any = cgutils.alloca_once_value


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


def _splat(build: Any, factor: Any) -> Any:
    """Return the vector of LANES times `factor`."""
    factors = ir.Constant(ir.VectorType(ir.FloatType(), LANES), ir.Undefined)
    for lane in range(LANES):
        factors = build.insert_element(factors, factor, ir.Constant(ir.IntType(32), lane))
    return factors


def _at(build: Any, address: Any, kind: Any = None) -> Any:
    """Return the pointer to a vector, or a number of `kind`, at `address`."""
    return build.inttoptr(address, (kind or ir.VectorType(ir.FloatType(), LANES)).as_pointer())


def _add_runs(_: Any, to: Any, what: Any, factor: Any, runs: Any, vectors: Any, to_step: Any, step: Any) -> Any:  # noqa: ARG001
    """Return numba's signature and code of ``to[r] += factor * what[r]`` for `runs` runs of ``vectors * LANES`` floats.

    `to` and `what` are addresses, `to_step` and `step` the bytes from one run to the next. Written for LLVM: numba
    would check each short run for overlap. The product is rounded before it is added, so all processors agree.
    """
    signature = numba.void(_word, _word, numba.float32, _word, _word, _word, _word)

    def code(context: Any, build: Any, _: Any, given: Any) -> Any:
        to, what, factor, runs, vectors, to_step, step = given
        factors, size = _splat(build, factor), ir.Constant(to.type, LANES * 4)
        with cgutils.for_range(build, runs) as run:
            target, source = (build.add(at, build.mul(run.index, by)) for at, by in ((to, to_step), (what, step)))
            with cgutils.for_range(build, vectors) as vector:
                here, there = (_at(build, build.add(at, build.mul(vector.index, size))) for at in (target, source))
                old, new = build.load(here, align=4), build.load(there, align=4)
                build.store(build.fadd(old, build.fmul(factors, new)), here, align=4)
        return context.get_dummy_value()

    return signature, code


def _add_blocks(blocks: int) -> Any:
    """Return an intrinsic that adds, in registers, `count` patches times their factors to `blocks` vectors at `to`.

    The other arguments are addresses: of the vectors' `offsets` in a patch (bytes), of the `count` addresses of the
    patches, of their float32 factors. The sums have the order of the patches.
    """

    def typed(_: Any, to: Any, offsets: Any, patches: Any, factors: Any, count: Any) -> Any:  # noqa: ARG001
        def code(context: Any, build: Any, _: Any, given: Any) -> Any:
            to, offsets, patches, factors, count = given

            def plus(address: Any, number: Any, size: int) -> Any:
                return build.add(address, build.mul(number, ir.Constant(to.type, size)))

            numbers = [ir.Constant(to.type, block) for block in range(blocks)]
            targets = [_at(build, plus(to, one, LANES * 4)) for one in numbers]
            steps = [build.load(_at(build, plus(offsets, one, 8), to.type)) for one in numbers]
            sums = [_alloca(build, build.load(target, align=4)) for target in targets]
            with cgutils.for_range(build, count) as j:
                patch = build.load(_at(build, plus(patches, j.index, 8), to.type))
                factor = _splat(build, build.load(_at(build, plus(factors, j.index, 4), ir.FloatType())))
                for total, step in zip(sums, steps, strict=True):
                    product = build.fmul(factor, build.load(_at(build, build.add(patch, step)), align=4))
                    build.store(build.fadd(build.load(total), product), total)
            for target, total in zip(targets, sums, strict=True):
                build.store(build.load(total), target, align=4)
            return context.get_dummy_value()

        return numba.void(*[_word] * 5), code

    return intrinsic(typed)


_runs: Any = intrinsic(_add_runs)
_many, _one = _add_blocks(BLOCKS), _add_blocks(1)


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
    offsets = np.array([r * row * 4 + b * 4 for r in range(high) for b in range(0, run, LANES)], np.uint64)
    patch, factor = np.empty(windows, np.uint64), np.empty(windows, np.float32)
    at, found, by = _word(offsets.ctypes.data), _word(patch.ctypes.data), _word(factor.ctypes.data)
    for i in range(n):
        for c in range(channels):
            kernel = own + _word(c * high) * step
            count = 0
            for k in range(windows):  # no branch: a window without gradient is overwritten by the next
                g = gradient[i, k, c]
                patch[count] = first + _word(i * image + places[(i * windows + k) * channels + c]) * _word(4)
                factor[count] = g
                count += g != 0
            if to_pixels:
                for k in range(count):
                    _runs(patch[k], kernel, factor[k], _word(high), vectors, line, step)
                continue
            rest = len(offsets) % BLOCKS
            for b in range(rest):
                _one(kernel + _word(b * LANES * 4), at + _word(b * 8), found, by, _word(count))
            for b in range(rest, len(offsets), BLOCKS):
                _many(kernel + _word(b * LANES * 4), at + _word(b * 8), found, by, _word(count))


patches = compiled(_patches)
