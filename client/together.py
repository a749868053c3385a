"""Answers the train messages of a round in one computation."""

from __future__ import annotations

from logging import WARNING

from flwr.app import Context, Message, RecordDict
from flwr.common.logger import log

from fedcross.client.batched.stack import Work
from fedcross.client.batched.trainer import train_batched
from fedcross.client.cache import RunCache, run_cache
from fedcross.client.flat_model import ModuleNet
from fedcross.client.request import carry_out, one_thread, receive, reply
from fedcross.core.errors import ProtocolError
from fedcross.strategies.objective import Trained


def together(messages: list[Message], contexts: list[Context], memory: int | None, graph: bool) -> list[Message]:
    """Return the replies to the train messages of several clients of a run, trained in one computation, in order.

    It takes at most `memory` bytes, by default what the device has; `graph` allows a compiled step. An objective that
    cannot be batched is trained one client after another.
    """
    cache = run_cache(str(contexts[0].run_config["overrides"]))
    contents = _replies(cache, [message.content for message in messages], memory, graph)
    return [Message(content, reply_to=message) for content, message in zip(contents, messages)]


def _replies(cache: RunCache, contents: list[RecordDict], memory: int | None, graph: bool) -> list[RecordDict]:
    if not cache.objective.batchable:
        if not cache.warned:
            cache.warned = True
            kind = type(cache.objective).__name__
            log(WARNING, "fedcross: %s cannot be batched, so clients are trained one after another.", kind)
        return [carry_out(cache, "train", content) for content in contents]
    with cache.errors(), cache.repeats(), one_thread(cache.device):
        requests = [receive(cache, content) for content in contents]
        if any(one.settings != requests[0].settings for one in requests):
            raise ProtocolError("Clients of one exchange have different numbers of epochs. Use engine=local.")
        settings, augment = requests[0].settings, cache.data.task.augment
        stacks: dict[ModuleNet, list[int]] = {}
        for i, one in enumerate(requests):  # models of one width make a stack
            stacks.setdefault(one.net, []).append(i)
        results: dict[int, Trained] = {}
        for net, places in stacks.items():
            works = [Work(requests[i].visit, requests[i].prepared, requests[i].scratch) for i in places]
            step = cache.compiled(net, stacked=True) if graph and cache.compiles else None
            trained = train_batched(net, cache.objective, works, settings, augment, memory=memory, compiled=step)
            results |= zip(places, trained)
        return [reply(cache, one, results[i]) for i, one in enumerate(requests)]
