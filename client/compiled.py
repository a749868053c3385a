"""Compiles the computation of a training step with ``torch.compile`` (``train.compile``).

Inductor fuses the small kernels of a step. On a GPU it also records them as CUDA graphs (``mode="reduce-overhead"``).
"""

from __future__ import annotations

from collections.abc import Callable
from logging import WARNING
from typing import Any

import torch
from flwr.common.logger import log
from torch.utils._triton import has_triton

from fedcross.client.device import breaks_device, out_of_memory

#: ``train.compile=auto`` compiles in runs of at least so many rounds: compiling takes up to a minute.
ROUNDS = 100


def is_compiled(choice: bool | str, device: torch.device, rounds: int) -> bool:
    """Return whether ``train.compile`` = `choice` compiles the step; ``auto`` does in long runs on a CUDA device."""
    if choice == "auto":
        return device.type == "cuda" and rounds >= ROUNDS and has_triton()
    return bool(choice)


class Compiled:
    """A function of tensors, compiled at its first call; where that fails, it is called as it is from then on.

    Parameters
    ----------
    function : callable
        Must compute the same in every call with equal arguments. Tensors that it returns are valid until the next call.
    device : torch.device
        Where it computes.
    backend : str
        Of ``torch.compile``.
    """

    def __init__(self, function: Callable[..., Any], device: torch.device, backend: str = "inductor") -> None:
        self.function = function
        mode = "reduce-overhead" if device.type == "cuda" and backend == "inductor" else None
        self._compiled: Any = torch.compile(function, fullgraph=True, dynamic=False, mode=mode, backend=backend)
        #: Why the function is not compiled; empty while it is.
        self.refused = ""

    def __call__(self, *args: Any) -> Any:
        """Return ``function(*args)``."""
        if self.refused:
            return self.function(*args)
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        try:
            return self._compiled(*args)
        except Exception as error:  # whatever the compiler raises: a mistake of the function shows in the call below
            if breaks_device(error) or out_of_memory(error):
                raise
            self.refused = (str(error).strip().splitlines() or [type(error).__name__])[0]
        result = self.function(*args)
        log(WARNING, "fedcross: steps run uncompiled: %s. train.compile=false avoids the attempt.", self.refused)
        return result
