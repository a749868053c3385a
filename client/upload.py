"""What leaves: the trained model through privacy, attack and compression, and what the client keeps for itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flwr.app import RecordDict
from torch import Tensor

from fedcross.client.attack import poison
from fedcross.client.privacy import noise_source, protect
from fedcross.client.visit import Arrived
from fedcross.core.errors import ProtocolError
from fedcross.core.randomness import stream
from fedcross.strategies.parts.objective import Trained, Visit
from fedcross.strategies.pool.layout import Arrays
from fedcross.strategies.wire.compression import marked
from fedcross.strategies.wire.protocol import answer
from fedcross.tasks.scoring import accuracy

if TYPE_CHECKING:
    from fedcross.client.workshop import Workshop


def leave(shop: Workshop, arrived: Arrived, trained: Trained) -> RecordDict:
    """Keep what the client keeps, and return the content of its reply.

    Raises
    ------
    ProtocolError
        If the objective keeps a state that it does not declare, or the other way round.
    """
    config, objective, visit = shop.config, shop.objective, arrived.visit
    outcome = objective.finish(visit, trained, arrived.prepared)
    if (outcome.state is not None) != objective.keeps:
        raise ProtocolError(f"{type(objective).__name__}: finish and `keeps` disagree about a state to keep.")
    metrics = {"train-loss": trained.loss, **_local_accuracy(shop, arrived, trained), **outcome.metrics}
    arrays, examples = shop.net.arrays(trained.params, trained.buffers), len(visit.y)
    if config.privacy.enabled:  # nothing exact leaves: no loss, no number of examples
        source = noise_source(config.privacy, config.seed, visit.round, visit.client, visit.exchange)
        arrays = protect(config.privacy, arrived.received, arrays, source, shop.net.frozen)
        examples, metrics = 1, {}
    if visit.client in shop.malicious:
        arrays = _poisoned(shop, visit, arrays)
    kept, scales = outcome.state, None
    if config.compression.up != "float32":
        arrays, scales, residual = shop.wire.upload(arrays, arrived.received, arrived.residual)
        kept = {**(kept or {}), **marked(residual)}
    if kept is not None and arrived.store is not None:
        arrived.store.save(int(visit.config["visit"]), kept, int(visit.config["keep"]))
    return answer(arrived.content, arrays, outcome.extras, examples, metrics, scales)


def _poisoned(shop: Workshop, visit: Visit, trained: Arrays) -> Arrays:
    """Return what a malicious client uploads instead of `trained`."""
    received = {name: tensor.detach().cpu().numpy() for name, tensor in visit.params.items()}
    generator = stream(shop.config.seed, "noise", visit.round, visit.client, visit.exchange)
    return poison(shop.config.attack, received, trained, generator)


def _local_accuracy(shop: Workshop, arrived: Arrived, trained: Trained) -> dict[str, float]:
    """Return the trained model's accuracy on the client's own test part, where it is asked for and there is one."""
    config, visit = shop.config, arrived.visit
    due = visit.round % config.evaluate_every == 0 or visit.round == visit.rounds
    own = shop.data.client_test(visit.client, shop.device) if config.evaluate_local and due else None
    if own is None:
        return {}

    def predict(x: Tensor) -> Tensor:
        return shop.objective.predict(shop.net, trained.params, trained.buffers, x, arrived.prepared)

    return {"local-accuracy": accuracy(predict, *own)}
