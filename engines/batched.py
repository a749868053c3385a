"""A Flower Grid that trains all clients of a round as one computation; made for one GPU, also works on a CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from logging import WARNING

from flwr.app import Message, MessageType
from flwr.common.logger import log
from pydantic import Field

from fedcross.core.errors import DeviceError, FederationError
from fedcross.core.settings import Settings
from fedcross.engines.grid import LocalGrid, serve
from fedcross.engines.job import Answer, Capabilities, Job, Together

CAPABILITIES = Capabilities()
#: The warning for a round that cannot be computed together; once for each reason.
APART = (
    "A round of %s clients is trained one client after another, as engine=local does: %s. So are later ones like it."
)


class Params(Settings):
    """``memory_gib``: memory limit of one computation, in GiB; clients that do not fit are trained after it. Unset:
    80 % of the GPU's free memory, 4 GiB on a CPU. ``cuda_graph``: record a training step and replay it where possible.
    """

    memory_gib: float | None = Field(None, gt=0)
    cuda_graph: bool = True


class BatchedGrid(LocalGrid):
    """A Flower Grid on top of `together`, which answers many train messages at once, in order.

    Messages of other kinds go to the client one by one; so do those of a round that cannot be computed together.
    """

    def __init__(
        self, client: Answer, clients: int, run_config: Mapping[str, str], together: Together, settings: Params
    ) -> None:
        super().__init__(client, clients, run_config)
        self._together = together
        self._settings = settings
        self._reasons: set[str] = set()

    def _pull(self, asked: set[str]) -> list[Message]:
        """Carry out all queued messages among `asked` and return their replies, in the order of the queue.

        A caller's set of ids has another order in every process, and how sums round can depend on a client's place.
        """
        messages = [self._queue.pop(message_id) for message_id in list(self._queue) if message_id in asked]
        training = [m for m in messages if m.metadata.message_type == MessageType.TRAIN]
        others = [m for m in messages if m.metadata.message_type != MessageType.TRAIN]
        return [*self._train(training), *map(self._carry_out, others)]

    def _train(self, messages: list[Message]) -> list[Message]:
        if not messages:
            return []
        memory = self._settings.memory_gib
        limit = None if memory is None else int(memory * 2**30)
        contexts = [self._context(message) for message in messages]
        try:
            return self._together(messages, contexts, limit, self._settings.cuda_graph)
        except DeviceError:  # every later message would fail too
            raise
        except Exception as error:  # noqa: BLE001 - one client's error must not cost the others their round
            first = str(error).partition("\n")[0].partition(". ")[0].rstrip(".")  # torch's errors go on for pages
            reason = f"{type(error).__name__}: {first}".removesuffix(": ")
            if (kind := re.sub(r"[-+.\d]+", "#", reason)) not in self._reasons:
                self._reasons.add(kind)
                log(WARNING, APART, len(messages), reason)
            return [self._carry_out(message) for message in messages]


def run(job: Job) -> None:
    """Run `job` in this process."""
    if job.together is None:
        raise FederationError("engine=batched: this app cannot train several clients at once. Use engine=local.")
    config = {"overrides": job.overrides}
    serve(job, BatchedGrid(job.client, job.clients, config, job.together, job.settings))
