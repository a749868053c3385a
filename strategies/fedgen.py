"""FedGen: the server learns a generator of embeddings from the clients' heads; clients regularise with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import key
from fedcross.core.settings import Settings
from fedcross.strategies import objective
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts import generator as gen
from fedcross.strategies.parts.loss_random import categorical, normal, uniform
from fedcross.strategies.parts.losses import cross_entropy
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all
from fedcross.strategies.pool.pool import Array, Arrays

HEAD = ("classifier.weight", "classifier.bias")
# Purposes of the draws in one step.
NOISE_OWN, LABELS, NOISE_DRAWN = range(3)


class FedGenParams(Settings):
    """Settings, explained in ``conf/method/fedgen.yaml``."""

    alpha: float = Field(0.2, ge=0)
    beta: float = Field(0.2, ge=0)
    decay: float = Field(1.0, gt=0, le=1)
    batch: int = Field(50, ge=1)
    noise: int = Field(100, ge=1)
    noise_law: Literal["normal", "uniform"] = "normal"
    hidden: int = Field(512, ge=1)
    generator_steps: int = Field(50, ge=1)
    generator_batch: int = Field(50, ge=2)
    generator_lr: float = Field(3e-4, gt=0)
    generator_lr_decay: float = Field(1.0, gt=0, le=1)
    generator_weight_decay: float = Field(1e-2, ge=0)
    diversity: float = Field(1.0, ge=0)
    fresh_adam: bool = False

    def draw(self, key: Tensor, step: int | Tensor, purpose: int, rows: int, dtype: torch.dtype) -> Tensor:
        """Return the generator's noise (rows, noise)."""
        return (normal if self.noise_law == "normal" else uniform)(key, step, purpose, (rows, self.noise), dtype)


class Regularised(objective.Objective[FedGenParams]):
    """Cross-entropy, KL towards the head's view of generated embeddings, cross-entropy on generated embeddings."""

    halves = True
    needs = frozenset({"generator", "known"})
    sends = frozenset({"labels"})

    def prepare(self, visit: Visit) -> Prepared:
        """Return the generator, the known labels, both coefficients and the key of the draws."""
        if "generator" not in visit.extras:
            return {}
        like = next(iter(visit.params.values()))
        factor = self.params.decay ** (visit.round - 1)

        def coefficient(value: float) -> Tensor:
            return torch.tensor(max(value * factor, min(value, 1e-4)), dtype=like.dtype, device=like.device)

        generator = as_tensors(visit.extras["generator"], like)
        return {
            "generator": {name: tensor.to(like.dtype) for name, tensor in generator.items()},
            "known": as_tensors(visit.extras["known"], like)["labels"].to(like.dtype),
            "alpha": coefficient(self.params.alpha),
            "beta": coefficient(self.params.beta),
            "key": torch.tensor(key(visit.seed, "fedgen client", visit.round, visit.client), device=like.device),
        }

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the loss of one batch; examples of unknown labels count as 0 in the KL."""
        scores = net.logits(params, buffers, batch.x)
        loss = cross_entropy(scores, batch)
        if prepared and self.params.beta:
            z = self._embed(batch.y, NOISE_OWN, batch.step, prepared)
            target = functional.log_softmax(net.classify(params, buffers, z), 1).detach()
            each = (target.exp() * (target - functional.log_softmax(scores, 1))).sum(1)
            loss = loss + prepared["beta"] * batch.mean(each * prepared["known"][batch.y])
        if prepared and self.params.alpha:
            y = categorical(prepared["key"], batch.step, LABELS, self.params.batch, prepared["known"])
            drawn = net.classify(params, buffers, self._embed(y, NOISE_DRAWN, batch.step, prepared))
            loss = loss + prepared["alpha"] * functional.cross_entropy(drawn, y)
        return loss

    def _embed(self, y: Tensor, purpose: int, step: int | Tensor, prepared: Prepared) -> Tensor:
        """Return generated embeddings of labels `y`, shape (len(y), embedding)."""
        known = prepared["known"]
        noise = self.params.draw(prepared["key"], step, purpose, y.shape[0], known.dtype)
        return gen.generate(prepared["generator"], noise, gen.one_hot(y, known.shape[0], noise), train=False)

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        """Send how many examples of each label there are."""
        counts = torch.bincount(visit.y, minlength=visit.classes).cpu().numpy().astype(np.int64)
        return Outcome(extras={"labels": {"counts": counts}})


@dataclass
class FedGenState(ModelState):
    """The global model, the generator with running statistics, the labels that it knows, Adam's moments and step."""

    generator: Arrays
    known: Array
    moments: Arrays = field(default_factory=dict)
    adam_steps: int = 0


class FedGen(SingleModel[FedGenParams, FedGenState]):
    """Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.

    Generator g: noise and one-hot label -> linear 512 -> batch normalisation -> ReLU -> linear -> embedding z; 100,948
    weights for 10 classes and LeNet-5's embedding of 84. With heads h_k of this round's uploads, counts n_k^y and
    weights ``a_k^y = n_k^y / sum_j n_j^y``, the server takes `generator_steps` Adam steps on ::

        mean_b sum_k a_k^{y_b} CE(h_k(z_b), y_b)
        + diversity * exp(-mean_{b,c} (|e_b - e_c|^2 / dim e) (|z_b - z_c|_1 / dim z))

    with labels y_b drawn uniformly from those that a participant holds, and noise e. A client minimises ::

        CE + beta KL(softmax h(g(y)) || softmax h(f(x))) + alpha mean CE(h(g(y')), y')

    with y its own labels, the generated side of the KL detached, and y' drawn uniformly from the labels that the
    generator has been trained on. In round r (from 1) alpha and beta are multiplied by ``decay^(r-1)``, 1e-4 at least,
    as in the official code. The generator is in training mode on the server, in evaluation mode on clients.

    State: the global model, the generator with running statistics, Adam's moments and step, the known labels; clients
    keep none. Wire: down one model, and from the second round on the generator (weights and running statistics) and
    one byte per class; up one model and 8 bytes per class (label counts).

    Presets: ``method=fedgen`` has the coefficients of the FedCross lab (alpha = beta = .2, no decay, batches of 50),
    whose tables are compared here; the authors' alpha = beta = 10 were chosen for MNIST only.
    ``method=fedgen_official`` has theirs (times .98 a round, batches of 32).

    Deviations: counts are those of a client's whole data, not of the batches that it drew. Per-label weights multiply
    each example's loss; both codes multiply shapes (b,) and (b, 1), so the weight becomes a mean over the batch. Noise
    is standard normal as in the paper (`noise_law=uniform` as in the codes). Adam's state persists (anew each round in
    the lab's code: `fresh_adam=true`). The alpha term is a plain mean (times generator batch / client batch in the
    official code, 1 in its settings). In the first round, when both codes switch the terms off, the generator is not
    sent. A label that the generator was never trained on is left out of the KL. The codes' adversarial student term has
    weight 0 and is left out.
    """

    Objective = Regularised

    def init(self, start: Start) -> FedGenState:
        """Keep the model and create the generator; a ConfigError unless it has a linear head called ``classifier``."""
        if any(name not in start.arrays for name in HEAD):
            raise ConfigError(f"method.name='fedgen': needs a model with {' and '.join(HEAD)}. Choose another model.")
        classes, embedding = start.arrays[HEAD[0]].shape
        generator = gen.create(self.params.noise, classes, self.params.hidden, embedding, start.seed)
        return FedGenState(super().init(start).model, as_arrays(generator), np.zeros(classes, np.uint8))

    def dispatch(self, state: FedGenState, round: Round) -> list[Task]:
        """Send the global model, and the generator once it has been trained; ask for label counts."""
        known = {"generator": state.generator, "known": {"labels": state.known}} if state.known.any() else {}
        return to_all(state.model, round, extras=known, returns={"labels": {"counts": (state.known.shape, "int64")}})

    def aggregate(self, state: FedGenState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Train the generator on the uploaded heads, then average the models."""
        counts = np.array([_honest(u.extras["labels"]["counts"], u.num_examples) for u in uploads])
        metrics = {}
        if counts.any():
            metrics = {"generator_loss": self.train_generator(state, round, counts, [u.arrays for u in uploads])}
            state.known = state.known | (counts.sum(0) > 0).astype(np.uint8)
        super().aggregate(state, round, uploads)
        return metrics

    def train_generator(
        self, state: FedGenState, round: Round, counts: NDArray[np.int64], models: Sequence[Arrays]
    ) -> float:
        """Take the round's Adam steps and return the last loss.

        `counts` (k, classes) are the examples of each label that each client holds, `models` the k uploads, of which
        only the heads are used.
        """
        p, total = self.params, counts.sum(0)
        weight, bias = (torch.from_numpy(np.stack([m[name] for m in models]).astype(np.float32)) for name in HEAD)
        shares = torch.from_numpy((counts / np.maximum(total, 1)).astype(np.float32)).T  # (classes, k)
        held = torch.from_numpy((total > 0).astype(np.float64))
        draws = torch.tensor(key(round.seed, "fedgen generator", round.number))
        lr = p.generator_lr * p.generator_lr_decay ** (round.number - 1)
        before, moments = (0, {}) if p.fresh_adam else (state.adam_steps, as_tensors(state.moments))
        generator, state.adam_steps = as_tensors(state.generator), before + p.generator_steps
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the result must not depend on the machine's cores
        try:
            for step in range(p.generator_steps):
                y = categorical(draws, step, LABELS, p.generator_batch, held)
                noise = p.draw(draws, step, NOISE_DRAWN, p.generator_batch, torch.float32)
                leaves = {name: generator[name].requires_grad_() for name in gen.TRAINED}
                z = gen.generate(generator, noise, gen.one_hot(y, len(total), noise), train=True)
                loss = gen.teacher_loss(z, y, weight, bias, shares) + p.diversity * gen.diversity_loss(noise, z)
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                named = dict(zip(leaves, slopes))
                gen.adam(generator, named, moments, before + step + 1, lr, p.generator_weight_decay)
        finally:
            torch.set_num_threads(threads)
        state.generator, state.moments = as_arrays(generator), as_arrays(moments)
        return float(loss.detach())


def _honest(counts: NDArray[Any], examples: int) -> NDArray[np.int64]:
    """Return label counts (classes,) that sum to `examples` at most: no client takes the labels over by huge claims."""
    cut = np.clip(counts, 0, examples)
    bounded: NDArray[np.int64] = np.floor(cut * min(1.0, examples / max(int(cut.sum()), 1))).astype(np.int64)
    return bounded
