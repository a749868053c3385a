"""Finds out, before a step is recorded, what a CUDA graph would keep as it was while recording.

A graph holds the kernels of a step. What the CPU computes is no kernel: its result would stay as it was, silently. And
for what makes the host wait, CUDA ends the recording half-way, after which torch's memory allocator does not recover.
Both are refused in a call before the recording.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

#: What makes a tensor of a number (``torch.tensor(0.5)``), outside of what a mode sees.
_ATEN = torch.ops.aten
_LIFTING = (_ATEN.lift_fresh.default, _ATEN.lift_fresh_copy.default, _ATEN.lift_fresh_copy.out)
_COPYING = (_ATEN._to_copy.default, _ATEN.copy_.default)
#: Attention. Its seed and offset are tensors on the CPU, but on the GPU in a recording (torch's attention.cu, "Seed and
#: Offset Device"); nobody but its backward pass gets them.
_SEEDED = {
    _ATEN._scaled_dot_product_efficient_attention,
    _ATEN._scaled_dot_product_flash_attention,
    _ATEN._scaled_dot_product_cudnn_attention,
    _ATEN._efficient_attention_forward,
    _ATEN._flash_attention_forward,
}
#: What has a function ``synchronize``.
_WAITING: tuple[Any, ...] = (torch.cuda, torch.cuda.Stream, torch.cuda.Event)
#: Reads or sets the state of the GPU's random numbers, an error in a recording: ``torch.utils.checkpoint`` does.
_STATES = ("get_rng_state", "set_rng_state", "initial_seed", "seed", "manual_seed")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Raise a RuntimeError for what makes the host wait for the GPU inside the block: a number read, a copy, waiting.

    torch's own switch knows operations alone, not the functions that do nothing but wait, nor those that ask for the
    state of the GPU's random numbers.
    """
    before = torch.cuda.get_sync_debug_mode()
    with ExitStack() as stack:
        for owner in _WAITING:
            stack.callback(setattr, owner, "synchronize", owner.synchronize)
            owner.synchronize = partial(_waits, owner.__name__)
        for owner in (torch.cuda, torch.cuda.random):
            for name in _STATES:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, partial(_asks, name))
        stack.callback(torch.cuda.set_sync_debug_mode, before)
        with warnings.catch_warnings():  # each process would say that the switch is a prototype
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode("error")
        yield


def _waits(owner: str, *_: object, **__: object) -> NoReturn:
    raise RuntimeError(f"{owner.rpartition('.')[2]}.synchronize() waits for the GPU, which a recording cannot")


def _asks(name: str, *_: object, **__: object) -> NoReturn:
    raise RuntimeError(
        f"torch.cuda.{name}() asks for the state of random numbers, which a recording cannot; "
        "torch.utils.checkpoint needs preserve_rng_state=False"
    )


class NoHostWork(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises a RuntimeError if a step on a GPU computes on the CPU from anything but Python numbers.

    A number that a step turns into a tensor (``torch.tensor(0.5)``, or a number beside a tensor under ``vmap``) is a
    constant, in a graph as in Python. A tensor on the CPU that was there before may have another value at the next
    step, and a random number has.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        #: Tensors that the step made from Python numbers, by the address of their storage.
        self._constants: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call this mode as it is: nothing is compiled in it, and the wrapper costs a tenth of a call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        given = _tensors((args, kwargs))
        on_host = [one for one in given if one.device.type == "cpu"]
        lifted = func in _LIFTING
        for one in on_host:
            if not lifted and one.numel() and _place(one) not in self._constants:
                raise RuntimeError(
                    f"{_name(func)} computes with a tensor on the CPU, which a recording would keep; prepare it"
                )
        if func in _COPYING and on_host and _beside(args, kwargs or {}) and _leaves_host(given, kwargs or {}):
            raise RuntimeError(f"{_name(func)} copies from the CPU, which a recording cannot; prepare it")
        out = func(*args, **(kwargs or {}))
        seeded = func.overloadpacket in _SEEDED
        for one in _tensors(out):
            if one.device.type == "cpu" and one.numel():
                if len(given) > len(on_host) and not lifted and (one.is_floating_point() or not seeded):
                    raise RuntimeError(f"{_name(func)} brings a result to the CPU, which a recording would keep")
                if torch.Tag.nondeterministic_seeded in func.tags and not seeded:
                    raise RuntimeError(f"{_name(func)} draws on the CPU, which a recording would keep")
                self._constants[_place(one)] = one
        return out


def _beside(args: Any, kwargs: Any) -> bool:
    """Return whether the host does not wait for this copy, so that torch's switch lets it pass."""
    return bool(kwargs.get("non_blocking", len(args) > 2 and args[2]))


def _leaves_host(given: list[Tensor], kwargs: Any) -> bool:
    """Return whether the last of `given`, from the CPU, is copied to another device."""
    to = kwargs.get("device")
    there = given[0].device if to is None else torch.device(to)
    return given[-1].device.type == "cpu" != there.type


def _tensors(value: Any) -> list[Tensor]:
    """Return the tensors of an operation's arguments or results; torch's own trees take several times as long."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for one in value for tensor in _tensors(one)]


def _name(func: Any) -> str:
    return str(func).removeprefix("aten.")


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
