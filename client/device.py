"""The device on which a process trains: which one, its arithmetic, its memory, its errors."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from fedcross.conf.schema import Train
from fedcross.core.errors import ConfigError, DeviceError
from fedcross.core.settings import DEVICE, device_name

#: Share of a GPU's free memory, and bytes on other devices, that the stacks of the batched trainer may take.
GPU_SHARE = 0.8
CPU_BYTES = 4 << 30
#: Most freed bytes that a process keeps for its next step, and the size from which a block is given back at once.
FREED_BYTES, APART_BYTES = 256 << 20, 32 << 20
#: malloc.h's names of the two settings, and the variables of a user who chose another allocator or its settings.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ALLOCATOR = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")
#: Examples that a CPU scores at a time: what a layer returns then stays in its cache (docs/performance.md).
CACHED = 100
#: What torch's recurrent modules call; one of them is a whole layer stack over all steps.
RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
#: Errors of CUDA and its libraries. After one of them, the process cannot use the GPU any more.
_CUDA = re.compile(r"CUDA error|CUDA driver error|cuDNN error|CUDNN_STATUS|CUBLAS_STATUS", re.IGNORECASE)
#: torch's warning of an operation whose result may differ from run to run.
_VARIES = re.compile(r"(\w+) does not have a deterministic implementation")
#: Their words for too little memory. cuDNN 9 says ALLOCATION_FAILED; cuBLAS cannot even start on a full card.
_MEMORY = re.compile(
    r"out of memory|ALLOC_FAILED|ALLOCATION_FAILED|CUBLAS_STATUS_NOT_INITIALIZED when calling `?cublas(Lt)?Create",
    re.IGNORECASE,
)


def taken(name: str) -> str:
    """Return what the device `name` means on this machine, and start nothing: ``auto`` is a GPU if there is one."""
    wanted = device_name(name)
    if wanted == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    return wanted


def pick_device(name: str) -> torch.device:
    """Return the device called `name`, or the one that ``FEDCROSS_DEVICE`` names; ``auto`` is a GPU if there is one.

    A GPU is returned with its number and becomes the process's current one: streams, graphs and generators without a
    device of their own belong to it.

    Raises
    ------
    ConfigError
        If this machine has no such device.
    """
    wanted = taken(name)
    device = torch.device(wanted)
    if device.type == "cuda":
        number, found = device.index or 0, torch.cuda.device_count()
        if number >= found:
            raise ConfigError(
                f"device={wanted}: torch finds {found} usable GPUs on this machine. Choose device=auto or cpu, mend "
                f"the driver, or set {DEVICE}=cpu if only this machine has none."
            )
        device = torch.device("cuda", number)
        torch.cuda.set_device(device)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(
            f"device={wanted}: torch cannot use one on this machine. Choose device=auto or cpu, or set {DEVICE}=cpu."
        )
    return device


def gpu_name(device: torch.device) -> str | None:
    """Return the name of the GPU that `device` is, as its driver gives it; None for a processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def set_arithmetic(device: torch.device, settings: Train) -> None:
    """Set how a GPU computes in this process; warn of bfloat16 on a CPU that emulates it.

    torch's own default computes convolutions of float32 tensors in TF32 (10 bits of mantissa in place of 23). Here
    ``float32`` means float32, and ``tf32`` allows TF32 in convolutions, recurrent layers and matrix products.
    """
    if device.type == "cpu" and settings.precision == "bfloat16" and not computes_bfloat16():
        log(
            WARNING,
            "fedcross: train.precision=bfloat16: this CPU has neither AVX-512 BF16 nor AMX and takes about 5.7 times "
            "the time of float32. Set train.precision=float32.",
        )
    if device.type != "cuda":
        return
    if settings.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    # Not the newer `fp32_precision` of single operators: torch's own readers of `allow_tf32` fail after it was set.
    torch.backends.cuda.matmul.allow_tf32 = settings.precision == "tf32"
    torch.backends.cudnn.allow_tf32 = settings.precision == "tf32"
    torch.backends.cudnn.deterministic = settings.deterministic
    # Nothing here reads what was not written; torch would fill each new tensor first.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    # Only warnings where there is no such algorithm: `repeats` turns them into words, and training goes on.
    torch.use_deterministic_algorithms(settings.deterministic, warn_only=True)


def computes_bfloat16() -> bool:
    """Return whether this CPU has instructions for bfloat16; true on processors that torch cannot ask."""
    if platform.machine().lower() not in {"x86_64", "amd64"}:
        return True
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def has_recurrent_bfloat16() -> bool:
    """Return whether this CPU's recurrent layers can be in bfloat16."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class _Recurrent(TorchFunctionMode):
    """Takes recurrent functions out of autocast; their tensors become of `dtype` first."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        super().__init__()
        self._device, self._dtype = device, dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call `func`."""
        if func not in RECURRENT:
            return func(*args, **(kwargs or {}))
        with torch.autocast(self._device, enabled=False):
            return func(*tree_map(self._turned, args), **tree_map(self._turned, kwargs or {}))

    def _turned(self, leaf: Any) -> Any:
        return leaf.to(self._dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


@contextmanager
def bfloat16(device: torch.device, module: nn.Module) -> Iterator[None]:
    """Compute `module` in bfloat16 inside the block.

    On a GPU, torch's autocast would turn recurrent layers into float16 (torch 2.11 to 2.15), which needs a scaled
    loss. A CPU without AVX-512 has no LSTM in bfloat16: recurrent layers compute in float32 on it.
    """
    with torch.autocast(device.type, torch.bfloat16):
        recurrent = any(isinstance(part, nn.RNNBase) for part in module.modules())
        if not recurrent or (device.type == "cpu" and has_recurrent_bfloat16()):
            yield
            return
        with _Recurrent(device.type, torch.float32 if device.type == "cpu" else torch.bfloat16):
            yield


@contextmanager
def repeats(told: set[str]) -> Iterator[None]:
    """Say which operations inside the block have no algorithm that gives the same result in every run.

    torch warns of them at their first use, thus in the first visit of a run. `told` are the operations that were
    named before; new ones join.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_VARIES.pattern)
        show = warnings.showwarning

        def tell(message: Warning | str, *where: Any, **rest: Any) -> None:
            found = _VARIES.match(str(message))
            if found is None:
                show(message, *where, **rest)
            elif found[1] not in told:
                told.add(found[1])
                log(
                    WARNING,
                    "fedcross: train.deterministic=true, but torch has no deterministic algorithm of %s on this GPU: "
                    "results may differ from run to run.",
                    found[1],
                )

        warnings.showwarning = tell
        yield


def memory_budget(memory: int | None, device: torch.device) -> float:
    """Return how many bytes the stacks of one computation may take: `memory`, or what the device has.

    The driver counts the memory that torch keeps for later tensors as used; what is reserved and not allocated is free.
    """
    if memory is not None:
        return memory
    if device.type != "cuda":
        return CPU_BYTES
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (free + max(unused, 0)) * GPU_SHARE


def keep_freed_memory() -> bool:
    """Let this process keep freed memory for its next step; return whether it does.

    glibc gives the top of its heap back to the kernel. A step of a convolutional network frees hundreds of MiB, and the
    next one would ask for them again, page by page. Changes nothing where the user has chosen an allocator or its
    settings, and where the C library has no ``mallopt`` (macOS, Windows, musl).
    """
    if any(name in os.environ for name in ALLOCATOR):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return False
    return bool(mallopt(M_TRIM_THRESHOLD, FREED_BYTES) and mallopt(M_MMAP_THRESHOLD, APART_BYTES))


def free_unused(device: torch.device) -> None:
    """Give the memory that torch holds on `device` and does not use back to it; nothing on a CPU."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def evaluation_batch(device: torch.device, numbers: int, most: int = 1000, room: int = 2**24) -> int:
    """Return how many examples of `numbers` values each are scored at a time, at most `most`.

    On a GPU a batch holds at most `room` values, for cards with little memory. On a CPU it is CACHED, whatever the
    examples are: another size could change the last bit of a loss.
    """
    return CACHED if device.type == "cpu" else max(1, min(most, room // max(numbers, 1)))


def out_of_memory(error: BaseException) -> bool:
    """Return whether `error` says that the device's memory was too small; the process can go on after it."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = str(error)
    # What else cuSOLVER says is of one operation, not of the device.
    named = _CUDA.search(words) or "CUSOLVER_STATUS" in words
    return isinstance(error, RuntimeError) and bool(named and _MEMORY.search(words))


def breaks_device(error: BaseException) -> bool:
    """Return whether this process cannot use its GPU after `error`: any error of CUDA but too little memory."""
    if out_of_memory(error) or not isinstance(error, RuntimeError):
        return False
    return isinstance(error, torch.AcceleratorError) or bool(_CUDA.search(str(error)))


@contextmanager
def device_errors() -> Iterator[None]:
    """Turn an error after which the process cannot use its GPU into a DeviceError, which ends the process."""
    try:
        yield
    except RuntimeError as error:
        if not breaks_device(error):
            raise
        first = str(error).splitlines()[0]
        raise DeviceError(f"The GPU failed ({first}). This process cannot use it any more and must end.") from error
