"""Where the items run: a GPU unless another device is named, and processes that end with the one that began them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from benchmarks.gpu.report import Found

#: The repository, and its folders whose code computes.
ROOT = Path(__file__).parents[2]
CODE = ("benchmarks/gpu", "client", "conf", "core", "engines", "server", "strategies", "tasks")
#: Variables of a site that would choose otherwise than this program's arguments.
SITE = ("FEDCROSS_DEVICE", "FEDCROSS_GRAPHS")
#: How the names of variables begin that change how a GPU computes.
READ = ("CUDA_", "CUBLAS_", "CUDNN_", "NVIDIA_", "NCCL_", "PYTORCH_", "TORCH_", "OMP_")


def forget_site() -> None:
    """Drop the variables of :data:`SITE`, for this process and those that it starts."""
    for name in SITE:
        if (value := os.environ.pop(name, None)) is not None:
            print(f"{name}={value} does not hold here", file=sys.stderr, flush=True)


def about(device: str) -> Found:
    """Return the device, its name, torch's version and the environment.

    Raises
    ------
    ConfigError
        If torch cannot use `device` here. Only the names ``cpu`` and ``mps`` mean no GPU of NVIDIA or AMD.
    """
    import torch

    from fedcross.client.device import pick_device
    from fedcross.core.errors import ConfigError

    name = "cuda" if device == "auto" else device
    if name.startswith("cuda"):
        try:
            torch.cuda.init()  # type: ignore[no-untyped-call]
        except (RuntimeError, AssertionError) as error:
            raise ConfigError(
                f"torch {torch.__version__} (made for CUDA {torch.version.cuda}) cannot use a GPU here: {error} "
                f"Driver: {_driver()}. Without a GPU only the program can be tried: --device cpu --tiny"
            ) from error
    chosen = pick_device(name)
    machine = torch.cuda.get_device_name(chosen) if chosen.type == "cuda" else str(chosen).upper()
    known = {"device": str(chosen), "machine": machine, "torch": torch.__version__}
    return known | {"commit": commit(), "sources": sources(), "environment": _environment(chosen)}


def commit() -> str:
    """Return the commit that is checked out, ``unknown`` where that cannot be found out."""
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def sources(root: Path = ROOT) -> str:
    """Return a digest of all code and settings that a line may depend on, committed or not."""
    digest = hashlib.sha256()
    for folder in CODE:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in {".py", ".yaml"}:
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _environment(device: Any) -> Found:
    """Return what else may explain a result: driver, libraries, memory, and the variables that they read."""
    import torch

    found: Found = {"driver": _driver(), "CUDA": torch.version.cuda, "cuDNN": torch.backends.cudnn.version()}  # type: ignore[no-untyped-call]
    if device.type == "cuda":
        found["memory, GB"] = round(torch.cuda.get_device_properties(device).total_memory / 1e9, 1)
        found["GPUs"] = torch.cuda.device_count()
    return found | {name: value for name, value in os.environ.items() if name.startswith(READ)}


def _driver() -> str:
    """Return what the kernel says about NVIDIA's driver."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
    except OSError:
        return "none is loaded"


def other_processes(device: Any) -> int:
    """Return how many processes beside this one compute on the GPU `device`; 0 where ``nvidia-smi`` does not say."""
    import torch

    try:
        card = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        asked = ["nvidia-smi", "-i", card, "--query-compute-apps=pid", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, RuntimeError, AssertionError, AttributeError, subprocess.SubprocessError):
        return 0
    return max(len(said.splitlines()) - 1, 0)


def end_with_parent() -> None:
    """Let Linux end this process when the one that started it has ended, however it did."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Turn SIGTERM inside the block into a KeyboardInterrupt, so that what was started is ended."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt
