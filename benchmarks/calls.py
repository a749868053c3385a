"""Operator calls of a training step: of one client, and of ten clients as one computation. Needs no GPU.

::

    python -m benchmarks.calls

On a GPU a call that computes is a kernel to launch; a view costs only Python's time, and nothing in a CUDA graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedcross.client.batched.captured import Together
from fedcross.client.batched.state import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.schema import Train, settings_class
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective, Visit
from fedcross.tasks.inputs import Inputs, Prepare
from fedcross.tasks.models import create
from fedcross.tasks.reading.params import Normalise

CLIENTS, BATCH, STEPS = 10, 4, 3
#: Operations that compute nothing: another view of the same memory.
VIEWS = {
    "_reshape_alias", "_unsafe_view", "alias", "as_strided", "detach", "expand", "movedim", "permute", "select",
    "slice", "split", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
}  # fmt: skip


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operator calls by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count and carry out an operation."""
        self.found[str(func).removeprefix("aten.").split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def visits(net: ModuleNet, count: int, steps: int) -> list[Visit]:
    """Return visits of `steps` full batches each."""
    prepare = Prepare(Normalise((0.5,), (0.25,), 255.0), 4, net.device)  # as on a GPU: pictures lie there as bytes
    common: dict[str, Any] = {"extras": {}, "config": {}, "state": {}, "round": 1, "rounds": 1, "seed": 1}
    return [
        Visit(
            net=net,
            params={name: p.detach().clone() for name, p in net.params.items()},
            buffers={name: b.clone() for name, b in net.buffers.items()},
            inputs=Inputs(net.arrange(torch.randint(256, (steps * BATCH, 3, 32, 32), dtype=torch.uint8)), prepare),
            y=torch.randint(10, (steps * BATCH,)),
            client=client,
            classes=10,
            lr=0.01,
            **common,
        )
        for client in range(count)
    ]


def a_step(run: Callable[[int], object]) -> tuple[int, int]:
    """Return the operator calls of one step, and how many of them compute; ``run(n)`` trains for n steps."""
    found = []
    run(STEPS)  # what is done only once is done
    for steps in (STEPS, STEPS + 1):
        with Calls() as calls:
            run(steps)
        found.append(calls.found)
    more = found[1] - found[0]  # what one more step calls; starting and ending a visit fall out
    return more.total(), sum(number for name, number in more.items() if name not in VIEWS)


def counted(model: str, clients: int = CLIENTS) -> dict[str, tuple[int, int]]:
    """Return the calls of a step by way of training: all, and those that compute."""
    task: Any = SimpleNamespace(name="made up", shape=(3, 32, 32), classes=10, vocabulary=0)
    net = ModuleNet(create(model, settings_class("model", model)(), task, 1), torch.device("cpu"))
    settings, objective = Train(lr=0.01, momentum=0.5, epochs=1, batch=BATCH), Objective(Settings())

    def works(steps: int) -> list[Work]:
        return [Work(visit, {}, {}) for visit in visits(net, clients, steps)]

    def together(steps: int) -> None:
        # A recorder that only calls: each step is then counted once, as the replays of a graph are not.
        stage = Together(net, objective, record=lambda call: call)
        train_batched(net, objective, works(steps), settings, together=stage)

    return {
        "one client": a_step(lambda steps: train(net, objective, visits(net, 1, steps)[0], {}, settings)),
        "batched": a_step(lambda steps: train_batched(net, objective, works(steps), settings)),
        "batched, recorded": a_step(together),
    }


def main() -> None:
    """Print the table of docs/performance.md."""
    print("| model | way | calls | that compute | calls for each client | that compute |\n|---|---|---|---|---|---|")
    for model in ("lenet5", "resnet20"):
        for way, (calls, compute) in counted(model).items():
            k = CLIENTS if way != "one client" else 1
            print(f"| {model} | {way} | {calls:,} | {compute:,} | {calls / k:.0f} | {compute / k:.0f} |")


if __name__ == "__main__":
    main()
