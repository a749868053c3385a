"""A GPU that is not there: tensors that call themselves ``cuda:0`` and compute on the CPU.

torch's fake tensors hold no numbers, so code that reads a number (a loss, a label count) cannot run on them. These
tensors hold their numbers in a CPU tensor. An operation that mixes devices fails as on a GPU, and whatever crosses
between the devices is counted. The kernels are the CPU's: results equal those of a CPU to the bit, and nothing here
says how fast or how exact a GPU is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedcross.client import flat_model
from fedcross.client.host_work import NoHostWork
from tests.support.tape import Tape
from tests.support.waits import INDEXING, name_of, unrepeatable, waits

#: Has operations run without any mode, and without tensors' own classes. Torch's ``_disable_current_modes`` does the
#: same in Python, mode by mode, which takes longer than the operations of small networks.
_plain_torch = torch._C._DisableTorchDispatch
#: What ``parameter.data = view`` calls; the attribute makes a new object each time.
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]


@dataclass
class Counted:
    """What happened on the emulated GPU.

    Attributes
    ----------
    launches : int
        Operations.
    waits : list of str
        Operations that make the host wait: a number that Python reads, a copy between CPU and GPU.
    copies : int
        Copies to the GPU from pinned memory, for which the host does not wait.
    unrepeatable : list of str
        Operations without a deterministic algorithm, while only such algorithms are allowed.
    recorder : GpuRecorder
        Stands in for recording CUDA graphs.
    """

    launches: int = 0
    waits: list[str] = field(default_factory=list)
    copies: int = 0
    unrepeatable: list[str] = field(default_factory=list)
    recorder: GpuRecorder = field(default_factory=lambda: GpuRecorder())


class GpuRecorder:
    """Records what a call does on the emulated GPU, and refuses what makes the host wait."""

    def __init__(self) -> None:
        self.recordings = self.replays = 0

    def __call__(self, call: Callable[[], None]) -> Callable[[], None]:
        with NoHostWork():  # as the warm-up on a side stream
            call()
        return self._record(call)

    def record(self, call: Callable[[], None]) -> Callable[[], None]:
        """Record `call`, which runs once, and return what repeats it."""
        with NoHostWork():
            return self._record(call)

    def _record(self, call: Callable[[], None]) -> Callable[[], None]:
        self.recordings += 1
        mode, tape = _Operations.current, Tape()
        if mode is None:
            raise RuntimeError("there is no emulated GPU")
        mode.tape = tape
        try:
            call()
        finally:
            mode.tape = None

        def replay() -> None:
            self.replays += 1
            with _plain_torch():
                tape.replay()

        return replay


class GpuTensor(Tensor):
    """A tensor on the emulated GPU; `inner` holds its numbers."""

    inner: Tensor
    place: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> GpuTensor:
        made: GpuTensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner, made.place = inner, device
        return made

    def __init__(self, inner: Tensor, device: torch.device) -> None: ...

    # Torch's own core takes these for meta tensors: a real CUDA device would make autograd ask the driver for streams.
    device = property(lambda self: self.place)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = _Operations.current
        if mode is None:
            raise RuntimeError(f"{func}: a tensor of the emulated GPU outlived the emulation")
        return mode.run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    """Runs every operation on the inner tensors and says on which device its result lies."""

    current: _Operations | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call this mode as it is: nothing is compiled here, and the wrapper costs a tenth of a call."""
        return False

    def __init__(self, counted: Counted) -> None:
        super().__init__()
        self.counted = counted
        self.tape: Tape | None = None
        #: Tensors in pinned memory, by the address of their storage.
        self.pinned: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            here = torch.device("cuda", torch.cuda.current_device())
            kwargs = {**kwargs, "device": here}  # torch's core made it beside a tensor of the current GPU
        leaves: list[Tensor] = []
        inside = _undressed(args, leaves), {name: _undressed(value, leaves) for name, value in kwargs.items()}
        device = self._device(func, leaves, args, kwargs)
        known = {id(leaf.inner) if isinstance(leaf, GpuTensor) else id(leaf): leaf for leaf in leaves}
        if kwargs.get("device") is not None:
            inside[1]["device"] = torch.device("cpu")
        with _plain_torch():
            out = func(*inside[0], **inside[1])
            if self.tape is not None:
                self.tape.add(func, *inside, out)
        if name_of(func) == "_to_copy" and id(out) in known:
            out = out.clone()

        return _dressed(out, known, device)

    def _device(self, func: Any, leaves: list[Tensor], args: Any, kwargs: Any) -> torch.device | None:
        """Return the device of the result, None for the CPU; count, and refuse what a GPU refuses."""
        name = name_of(func)
        on = {leaf.device for leaf in leaves if isinstance(leaf, GpuTensor)}
        off = [leaf for leaf in leaves if not isinstance(leaf, GpuTensor)]
        to = kwargs.get("device")
        if on or (to is not None and torch.device(to).type == "cuda"):
            self.counted.launches += 1
        if on and waits(func, args, kwargs):
            self._wait(name)
        if on and torch.are_deterministic_algorithms_enabled() and unrepeatable(func, args, kwargs):
            self._vary(name)
        if name in {"_to_copy", "copy_"} and leaves:
            there = torch.device(to) if to is not None else leaves[0].device
            if (there.type == "cuda") != (leaves[-1].device.type == "cuda"):
                self._copy(name, there, leaves[-1], args, kwargs)
            return there if there.type == "cuda" else None
        if to is not None and not leaves:
            return torch.device(to) if torch.device(to).type == "cuda" else None
        if on and name in INDEXING and any(leaf.dim() and not leaf.is_floating_point() for leaf in off):
            self._wait(f"{name} with an index from the CPU")
            off = [leaf for leaf in off if leaf.is_floating_point()]
        if len(on) > 1 or (on and any(leaf.dim() for leaf in off)):
            raise RuntimeError(f"Expected all tensors to be on the same device: {name} of {[t.device for t in leaves]}")
        if to is not None:
            return torch.device(to) if torch.device(to).type == "cuda" else None
        return next(iter(on), None)

    def _copy(self, name: str, there: torch.device, source: Tensor, args: Any, kwargs: Any) -> None:
        """Count a copy between the devices; only one from pinned memory goes on beside the host."""
        beside = kwargs.get("non_blocking", len(args) > 2 and args[2])
        if there.type == "cuda" and beside and _place(source) in self.pinned and self.tape is None:
            self.counted.copies += 1
        else:
            self._wait(f"{name} to {there.type}")

    def _vary(self, what: str) -> None:
        """Do what torch does where an operation has no deterministic algorithm."""
        text = f"{what} does not have a deterministic implementation, but you set 'torch.use_deterministic_algorithms"
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError(text)
        self.counted.unrepeatable.append(what)
        warnings.warn(text, UserWarning, stacklevel=2)

    def _wait(self, what: str) -> None:
        if self.tape is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.counted.waits.append(what)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _undressed(value: Any, leaves: list[Tensor]) -> Any:
    """Return an argument of an operation with the inner tensors; append its tensors to `leaves`.

    Arguments are tensors, plain values, and lists or tuples of them; torch's trees take four times as long.
    """
    if isinstance(value, Tensor):
        leaves.append(value)
        return value.inner if isinstance(value, GpuTensor) else value
    return type(value)([_undressed(one, leaves) for one in value]) if type(value) in (list, tuple) else value


def _dressed(value: Any, known: dict[int, Tensor], device: torch.device | None) -> Any:
    """Return a result of an operation with the tensors of the GPU; arguments that it returns are those of `known`.

    No closure: one that calls itself would keep the tensors until garbage is collected, and nothing could swap them.
    """
    if isinstance(value, Tensor):
        found = known.get(id(value))
        return found if found is not None else value if device is None else GpuTensor(value, device)
    return type(value)([_dressed(one, known, device) for one in value]) if type(value) in (list, tuple) else value


class _Functions(TorchFunctionMode):
    """Lets ``parameter.data = view`` change the inner tensor, which torch cannot know."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _SET_DATA and isinstance(args[0], GpuTensor):
            args[0].inner = args[1].inner
            return None
        if func is torch.tensor and kwargs and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return torch.tensor(*args, **kwargs).to(device)
        if func is Tensor.new_tensor and isinstance(args[0], GpuTensor):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **(kwargs or {})}).to(args[0].device)
        if func is Tensor.pin_memory:
            pinned: Tensor = args[0].clone()
            if _Operations.current is not None:
                _Operations.current.pinned[_place(pinned)] = pinned
            return pinned
        return func(*args, **(kwargs or {}))


def _swapping(to: Any) -> Any:
    """Return ``Module.to`` that exchanges parameters for those of the emulated GPU, whose class is another."""

    def moved(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return to(self, *args, **kwargs)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return moved


@contextmanager
def emulated_gpu(monkeypatch: pytest.MonkeyPatch, gpus: int = 1) -> Iterator[Counted]:
    """Give torch `gpus` GPUs inside the block; cuDNN is off, so that torch chooses operations that a CPU has too.

    The kernels use one thread, as those of a CPU client do: with two, a product of matrices sums in another order.
    """
    counted = Counted()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        # Inside a fake mode torch does not look for a driver when it is asked for a tensor on a GPU.
        monkeypatch.setattr(FakeTensorMode, "avoid_device_init", False)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        monkeypatch.setattr(torch.nn.Module, "to", _swapping(torch.nn.Module.to))
        for name, value in _driver(gpus).items():
            monkeypatch.setattr(torch.cuda, name, value)
        # How a GPU computes is no matter here, and other tests of this process must not see it.
        monkeypatch.setattr("fedcross.client.workshop.set_arithmetic", lambda *_: None)
        monkeypatch.setattr("fedcross.server.session.set_arithmetic", lambda *_: None)
        monkeypatch.setattr("fedcross.client.cuda_graphs.record_cuda", counted.recorder)
        # The CPU's layout of pictures, for the CPU's order of sums.
        monkeypatch.setattr(flat_model, "channels_last", partial(_on_cpu, flat_model.channels_last))
        mode = stack.enter_context(_Operations(counted))
        stack.enter_context(_Functions())
        _Operations.current = mode
        try:
            yield counted
        finally:
            _Operations.current = None


def _on_cpu(layout: Callable[..., bool], module: torch.nn.Module, _: torch.device, precision: str) -> bool:
    return layout(module, torch.device("cpu"), precision)


def _driver(gpus: int) -> dict[str, Any]:
    """Return what takes the place of the functions of ``torch.cuda`` that ask the driver."""
    current = [0]

    def choose(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    return {
        "is_available": lambda: gpus > 0,
        "device_count": lambda: gpus,
        "set_device": choose,
        "current_device": lambda: current[0],
        "get_device_name": lambda device=None: "emulated GPU",
        "mem_get_info": lambda device=None: (2**33, 2**34),
        "memory_reserved": lambda device=None: 0,
        "memory_allocated": lambda device=None: 0,
        "empty_cache": lambda: None,
    }
