"""FedGen: the server learns a generator of embeddings from the clients' heads; clients regularise with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import key
from fedcross.core.settings import Settings
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.objective import (
    Batch,
    Net,
    Objective,
    Outcome,
    Prepared,
    Tensors,
    Trained,
    Visit,
    as_arrays,
    as_tensors,
)
from fedcross.strategies.parts.generator import TRAINED, create, diversity_loss, generate, one_hot, teacher_loss
from fedcross.strategies.parts.loss_random import categorical, normal, uniform
from fedcross.strategies.parts.single_model import ModelState, SingleModel
from fedcross.strategies.pool.pool import Array
from fedcross.strategies.wire.records import Arrays, Spec

HEAD = ("classifier.weight", "classifier.bias")
MOMENTS = ("first", "second")
RATES = (0.9, 0.999)  # of Adam's moments
ADAM_EPSILON = 1e-8
# Purposes of the draws in one step.
NOISE_OWN, LABELS, NOISE_DRAWN = range(3)


class FedGenParams(Settings):
    """Coefficients of the client's terms, sizes and optimiser of the generator."""

    alpha: float = Field(0.2, ge=0, description="weight of the cross-entropy on generated embeddings")
    beta: float = Field(0.2, ge=0, description="weight of the KL term")
    decay: float = Field(1.0, gt=0, le=1, description="factor of alpha and beta per round")
    batch: int = Field(50, ge=1, description="generated embeddings in one client step")
    noise: int = Field(100, ge=1, description="numbers of noise")
    noise_law: Literal["normal", "uniform"] = "normal"
    hidden: int = Field(512, ge=1, description="hidden units of the generator")
    generator_steps: int = Field(50, ge=1, description="server steps per round")
    generator_batch: int = Field(50, ge=2, description="embeddings in one server step")
    generator_lr: float = Field(3e-4, gt=0)
    generator_lr_decay: float = Field(1.0, gt=0, le=1, description="factor of generator_lr per round")
    generator_weight_decay: float = Field(1e-2, ge=0, description="L2, added to the gradient")
    diversity: float = Field(1.0, ge=0, description="weight of the diversity term")
    fresh_adam: bool = Field(False, description="forget Adam's moments each round")


class Regularised(Objective[FedGenParams]):
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
            faded = max(value * factor, min(value, 1e-4))
            return torch.tensor(faded, dtype=like.dtype, device=like.device)

        generator = as_tensors(visit.extras["generator"], like)
        return {
            "generator": {name: tensor.to(like.dtype) for name, tensor in generator.items()},
            "known": as_tensors(visit.extras["known"], like)["labels"].to(like.dtype),
            "alpha": coefficient(self.params.alpha),
            "beta": coefficient(self.params.beta),
            "key": torch.tensor(key(visit.seed, "fedgen client", visit.round, visit.client), device=like.device),
        }

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        """Return the loss of one batch."""
        scores = net.logits(params, buffers, batch.x)
        loss = batch.mean(functional.cross_entropy(scores, batch.y, reduction="none"))
        if not prepared:
            return loss
        if self.params.beta:
            loss = loss + prepared["beta"] * self._divergence(net, params, buffers, batch, scores, prepared)
        if self.params.alpha:
            y = categorical(prepared["key"], batch.step, LABELS, self.params.batch, prepared["known"])
            drawn = net.classify(params, buffers, self._embed(y, NOISE_DRAWN, batch.step, prepared))
            loss = loss + prepared["alpha"] * functional.cross_entropy(drawn, y)
        return loss

    def _divergence(
        self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, scores: Tensor, prepared: Prepared
    ) -> Tensor:
        """Return the mean KL over the batch; examples of unknown labels count as 0."""
        z = self._embed(batch.y, NOISE_OWN, batch.step, prepared)
        target = functional.log_softmax(net.classify(params, buffers, z), 1).detach()
        each = (target.exp() * (target - functional.log_softmax(scores, 1))).sum(1)
        return batch.mean(each * prepared["known"][batch.y])

    def _embed(self, y: Tensor, purpose: int, step: int | Tensor, prepared: Prepared) -> Tensor:
        """Return generated embeddings of labels `y`, shape (len(y), embedding)."""
        known = prepared["known"]
        noise = draw_noise(self.params, prepared["key"], step, purpose, y.shape[0], known.dtype)
        return generate(prepared["generator"], noise, one_hot(y, known.shape[0], noise), train=False)

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

    Presets: ``method=fedgen`` has the coefficients of the FedCross lab (alpha = beta = .2 for every data set, no decay,
    batches of 50), because its tables are the ones that are compared here, and because FedGen's authors' alpha = beta =
    10 were chosen for MNIST only. ``method=fedgen_official`` has theirs (times .98 a round, batches of 32).

    Deviations: counts are those of a client's whole data, not of the batches it happened to draw. Per-label weights
    multiply each example's loss; both codes multiply shapes (b,) and (b, 1), which makes the weight a mean over the
    batch. Noise is standard normal as in the paper (`noise_law=uniform` as in the codes). Adam's state persists (the
    lab's code makes it anew each round: `fresh_adam=true`). The alpha term is a plain mean (the official code
    multiplies by generator batch / client batch, 1 in its settings). In the first round, when the generator is
    untrained, both codes switch the terms off; here it is not even sent. A label that the generator has never been
    trained on is left out of the KL. The codes' adversarial student term has weight 0 and is left out.
    """

    Objective = Regularised

    def init(self, start: Start) -> FedGenState:
        """Keep the model and create the generator.

        Raises
        ------
        ConfigError
            If the model has no linear head called ``classifier``.
        """
        if any(name not in start.arrays for name in HEAD):
            raise ConfigError(f"method.name='fedgen': needs a model with {' and '.join(HEAD)}. Choose another model.")
        classes, embedding = start.arrays[HEAD[0]].shape
        generator = as_arrays(create(self.params.noise, classes, self.params.hidden, embedding, start.seed))
        return FedGenState(super().init(start).model, generator, np.zeros(classes, np.uint8))

    def dispatch(self, state: FedGenState, round: Round) -> list[Task]:
        """Send the global model, and the generator once it has been trained; ask for label counts."""
        extras: dict[str, Arrays] = {}
        if state.known.any():
            extras = {"generator": state.generator, "known": {"labels": state.known}}
        returns: dict[str, Spec] = {"labels": {"counts": (state.known.shape, "int64")}}
        return [replace(task, extras=extras, returns=returns) for task in super().dispatch(state, round)]

    def aggregate(self, state: FedGenState, round: Round, uploads: list[Upload]) -> dict[str, float]:
        """Train the generator on the uploaded heads, then average the models."""
        if not uploads:
            return {}
        counts = np.stack([_honest(u.extras["labels"]["counts"], u.num_examples) for u in uploads])
        metrics = {}
        if counts.any():
            loss = self.train_generator(state, round, counts, [u.arrays for u in uploads])
            state.known = state.known | (counts.sum(0) > 0).astype(np.uint8)
            metrics = {"generator_loss": loss}
        super().aggregate(state, round, uploads)
        return metrics

    def train_generator(self, state: FedGenState, round: Round, counts: np.ndarray, models: Sequence[Arrays]) -> float:
        """Take the round's Adam steps and return the last loss.

        Parameters
        ----------
        state, round
            The generator, and which round this is.
        counts : int64 array, shape (k, classes)
            Examples of each label that each client holds.
        models : sequence of Arrays
            The k uploads; only their heads are used.
        """
        p = self.params
        heads = [torch.from_numpy(np.stack([m[name] for m in models]).astype(np.float32)) for name in HEAD]
        total = counts.sum(0)
        weights = torch.from_numpy((counts / np.maximum(total, 1)).astype(np.float32)).T  # (classes, k)
        held = torch.from_numpy((total > 0).astype(np.float64))
        visit = torch.tensor(key(round.seed, "fedgen generator", round.number))
        lr = p.generator_lr * p.generator_lr_decay ** (round.number - 1)
        generator, adam = as_tensors(state.generator), Adam(as_tensors(state.moments), state.adam_steps)
        if p.fresh_adam or not adam.moments:
            adam = Adam({f"{m}.{n}": torch.zeros_like(generator[n]) for m in MOMENTS for n in TRAINED}, 0)
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the result must not depend on the machine's cores
        try:
            for step in range(p.generator_steps):
                y = categorical(visit, step, LABELS, p.generator_batch, held)
                noise = draw_noise(p, visit, step, NOISE_DRAWN, p.generator_batch, torch.float32)
                leaves = {name: generator[name].requires_grad_() for name in TRAINED}
                z = generate(generator, noise, one_hot(y, len(total), noise), train=True)
                loss = teacher_loss(z, y, heads[0], heads[1], weights) + p.diversity * diversity_loss(noise, z)
                slopes = torch.autograd.grad(loss, list(leaves.values()))
                adam.step(generator, dict(zip(leaves, slopes)), lr, p.generator_weight_decay)
        finally:
            torch.set_num_threads(threads)
        state.generator, state.moments, state.adam_steps = as_arrays(generator), as_arrays(adam.moments), adam.steps
        return float(loss.detach())


@dataclass
class Adam:
    """Adam (Kingma and Ba 2015) with L2 in the gradient, as ``torch.optim.Adam`` by default.

    Written out because making an optimiser of PyTorch imports its compiler, which takes seconds.
    """

    moments: Tensors
    steps: int

    def step(self, weights: Tensors, slopes: Tensors, lr: float, decay: float) -> None:
        """Take one step: `weights` get new tensors."""
        self.steps += 1
        first_left, second_left = (1 - rate**self.steps for rate in RATES)
        for name, slope in slopes.items():
            weight = weights[name].detach()
            gradient = slope + decay * weight
            first, second = (self.moments[f"{m}.{name}"] for m in MOMENTS)
            first.lerp_(gradient, 1 - RATES[0])
            second.mul_(RATES[1]).addcmul_(gradient, gradient, value=1 - RATES[1])
            size = (second / second_left).sqrt_().add_(ADAM_EPSILON)
            weights[name] = weight - (lr / first_left) * (first / size)


def draw_noise(
    params: FedGenParams, visit: Tensor, step: int | Tensor, purpose: int, rows: int, dtype: torch.dtype
) -> Tensor:
    """Return the generator's noise (rows, noise)."""
    law = normal if params.noise_law == "normal" else uniform
    return law(visit, step, purpose, (rows, params.noise), dtype)


def _honest(counts: np.ndarray, examples: int) -> np.ndarray:
    """Return label counts (classes,) that sum to `examples` at most: no client takes the labels over by huge claims."""
    cut = np.clip(counts, 0, examples)
    bounded: np.ndarray = np.floor(cut * min(1.0, examples / max(int(cut.sum()), 1))).astype(np.int64)
    return bounded
