"""FedGen: the server learns a generator of embeddings from the clients' heads; clients regularise with it."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from fedcross.core.errors import ConfigError
from fedcross.core.randomness import key, stream
from fedcross.strategies import objective
from fedcross.strategies.method import Arrays, Round, Settings, Start, Task, Upload
from fedcross.strategies.objective import Batch, Net, Outcome, Prepared, Tensors, Trained, Visit, as_arrays, as_tensors
from fedcross.strategies.parts.losses import cross_entropy, divergence
from fedcross.strategies.parts.prototypes import credible
from fedcross.strategies.parts.single_model import ModelState, SingleModel, to_all
from fedcross.tasks.models.counted_random import categorical, normal, uniform

Matrix = NDArray[np.float64]
HEAD = ("classifier.weight", "classifier.bias")
#: Parameters of the generator that Adam updates; the server also sends ``norm.mean`` and ``norm.variance``.
TRAINED = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "latent.weight", "latent.bias")
# PyTorch's defaults: batch normalisation's epsilon, the weight of a new batch in its statistics; Adam's.
EPSILON, FORGET, RATES, ADAM_EPSILON = 1e-5, 0.1, (0.9, 0.999), 1e-8
# Purposes of the draws in one step.
NOISE_OWN, LABELS, NOISE_DRAWN = range(3)


class FedGenParams(Settings):
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


def create(noise: int, classes: int, hidden: int, embedding: int, seed: int) -> Arrays:
    """Return a new generator: linear layers uniform in +-1/sqrt(inputs) as PyTorch's, normalisation the identity."""
    found: Arrays = {}
    for name, outputs, inputs in (("hidden", hidden, noise + classes), ("latent", embedding, hidden)):
        draws, bound = stream(seed, f"fedgen {name}"), 1 / np.sqrt(inputs)
        found[f"{name}.weight"] = draws.uniform(-bound, bound, (outputs, inputs)).astype(np.float32)
        found[f"{name}.bias"] = draws.uniform(-bound, bound, outputs).astype(np.float32)
    norm = {"weight": 1.0, "bias": 0.0, "mean": 0.0, "variance": 1.0}
    return found | {f"norm.{name}": np.full(hidden, value, np.float32) for name, value in norm.items()}


def generate(generator: Tensors, noise: Tensor, y: Tensor, classes: int, train: bool = False) -> Tensor:
    """Return embeddings (b, embedding) of `noise` (b, noise) and labels `y` (b,).

    In training mode the batch's own statistics normalise, and the running ones are replaced in the dictionary.
    """
    labels = (y[:, None] == torch.arange(classes, device=y.device)).to(noise.dtype)  # one-hot, also under vmap
    hidden = functional.linear(torch.cat([noise, labels], 1), generator["hidden.weight"], generator["hidden.bias"])
    mean, variance = generator["norm.mean"], generator["norm.variance"]
    if train:
        unbiased = hidden.var(0, unbiased=False).detach() * (len(hidden) / (len(hidden) - 1))
        generator["norm.mean"] = torch.lerp(mean, hidden.mean(0).detach(), FORGET)
        generator["norm.variance"] = torch.lerp(variance, unbiased, FORGET)
        mean, variance = hidden.mean(0), hidden.var(0, unbiased=False)
    scaled = (hidden - mean) * torch.rsqrt(variance + EPSILON) * generator["norm.weight"] + generator["norm.bias"]
    return functional.linear(torch.relu(scaled), generator["latent.weight"], generator["latent.bias"])


def teacher_loss(z: Tensor, y: Tensor, weight: Tensor, bias: Tensor, shares: Tensor) -> Tensor:
    """Return ``mean_b sum_k shares[y_b, k] CE(weight_k z_b + bias_k, y_b)``.

    `z` (b, embedding), `y` (b,); heads' `weight` (k, classes, embedding), `bias` (k, classes); `shares` (classes, k).
    """
    logs = functional.log_softmax(torch.einsum("be,kce->bkc", z, weight) + bias, 2)
    own = logs.gather(2, y[:, None, None].expand(-1, logs.shape[1], 1))[:, :, 0]
    return -(shares[y] * own).sum(1).mean()


def diversity_loss(noise: Tensor, z: Tensor) -> Tensor:
    """Return ``exp(-mean_{b,c} mse(noise_b, noise_c) * mae(z_b, z_c))``: small if embeddings differ as their noise."""
    apart = (noise[:, None] - noise[None]).square().mean(2)
    spread = (z[:, None] - z[None]).abs().mean(2)
    return torch.exp(-(apart * spread).mean())


def adam(weights: Tensors, slopes: Tensors, moments: Tensors, number: int, lr: float, decay: float) -> None:
    """Take step `number`, from 1, of Adam (Kingma and Ba 2015) with L2 in the gradient, as ``torch.optim.Adam``.

    `moments` hold ``first.NAME`` and ``second.NAME``; missing ones are 0. PyTorch's own imports its compiler (seconds).
    """
    for name, slope in slopes.items():
        weight = weights[name].detach()
        gradient = slope + decay * weight
        first, second = (moments.setdefault(f"{m}.{name}", torch.zeros_like(weight)) for m in ("first", "second"))
        first.lerp_(gradient, 1 - RATES[0])
        second.mul_(RATES[1]).addcmul_(gradient, gradient, value=1 - RATES[1])
        size = (second / (1 - RATES[1] ** number)).sqrt_().add_(ADAM_EPSILON)
        weights[name] = weight - (lr / (1 - RATES[0] ** number)) * (first / size)


class Regularised(objective.Objective[FedGenParams]):
    halves = True
    needs = frozenset({"generator", "known"})
    sends = frozenset({"labels"})

    def prepare(self, visit: Visit) -> Prepared:
        if "generator" not in visit.extras:
            return {}
        like, p, factor = next(iter(visit.params.values())), self.params, self.params.decay ** (visit.round - 1)
        sent = as_tensors({**visit.extras["generator"], **visit.extras["known"]}, like)
        generator = {name: tensor.to(like.dtype) for name, tensor in sent.items()}
        return {
            "known": generator.pop("labels"),
            "generator": generator,
            "alpha": like.new_tensor(max(p.alpha * factor, min(p.alpha, 1e-4))),
            "beta": like.new_tensor(max(p.beta * factor, min(p.beta, 1e-4))),
            "key": torch.tensor(key(visit.seed, "fedgen client", visit.round, visit.client), device=like.device),
        }

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores = net.logits(params, buffers, batch.x)
        loss = cross_entropy(scores, batch)
        if not prepared:
            return loss
        known, key = prepared["known"], prepared["key"]

        def seen(y: Tensor, purpose: int) -> Tensor:
            """Return the head's scores of generated embeddings of labels `y`."""
            noise = self.params.draw(key, batch.step, purpose, y.shape[0], known.dtype)
            return net.classify(params, buffers, generate(prepared["generator"], noise, y, known.shape[0]))

        if self.params.beta:
            each = divergence(scores, seen(batch.y, NOISE_OWN).detach())
            loss = loss + prepared["beta"] * batch.mean(each * known[batch.y])
        if self.params.alpha:
            y = categorical(key, batch.step, LABELS, self.params.batch, known)
            loss = loss + prepared["alpha"] * functional.cross_entropy(seen(y, NOISE_DRAWN), y)
        return loss

    def finish(self, visit: Visit, trained: Trained, prepared: Prepared) -> Outcome:
        counts = torch.bincount(visit.y, minlength=visit.classes).cpu().numpy().astype(np.int64)
        return Outcome(extras={"labels": {"counts": counts}})


@dataclass
class FedGenState(ModelState):
    generator: Arrays = field(default_factory=dict)
    known: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8))
    moments: Arrays = field(default_factory=dict)
    adam_steps: int = 0


class FedGen(SingleModel[FedGenParams, FedGenState]):
    """Zhu, Hong and Zhou, Data-Free Knowledge Distillation for Heterogeneous Federated Learning, ICML 2021.

    Generator g: noise and one-hot label -> linear 512 -> batch normalisation -> ReLU -> linear -> embedding z. With
    heads h_k of this round's uploads, counts n_k^y and ``a_k^y = n_k^y / sum_j n_j^y`` the server takes Adam steps on
    ::

        mean_b sum_k a_k^{y_b} CE(h_k(z_b), y_b)
        + diversity * exp(-mean_{b,c} (|e_b - e_c|^2 / dim e) (|z_b - z_c|_1 / dim z))

    with labels y_b drawn uniformly from those that a participant holds, and noise e. A client minimises ::

        CE + beta KL(softmax h(g(y)) || softmax h(f(x))) + alpha mean CE(h(g(y')), y')

    with y its own labels, the generated side of the KL detached, and y' drawn uniformly from the labels that the
    generator has been trained on. In round r (from 1) alpha and beta are multiplied by ``decay^(r-1)``, 1e-4 at least.

    State: the global model, the generator with running statistics, Adam's moments and step, the known labels. Wire:
    down one model, from round 2 on the generator and a byte per class; up one model and int64 label counts.

    Deviations: counts are those of a client's whole data, not of the batches that it drew, and count only if they add
    up to its examples. Per-label weights multiply each example's loss; both codes multiply shapes (b,) and (b, 1), so
    the weight becomes a mean over the batch. Noise is standard normal as in the paper (`noise_law=uniform` as in the
    codes). Adam's state persists (`fresh_adam=true`: anew each round, as in the lab's code). The alpha term is a plain
    mean, in the official code times generator batch / client batch. A label that the generator was never trained on is
    left out of the KL. The codes' adversarial student term has weight 0 and is left out. ``method=fedgen`` has the
    coefficients of the FedCross lab, ``method=fedgen_official`` the authors' for MNIST.
    """

    Objective = Regularised

    def init(self, start: Start) -> FedGenState:
        if any(name not in start.arrays for name in HEAD):
            raise ConfigError(f"method.name='fedgen': needs a model with {' and '.join(HEAD)}. Choose another model.")
        state, (classes, embedding) = super().init(start), start.arrays[HEAD[0]].shape
        state.generator = create(self.params.noise, classes, self.params.hidden, embedding, start.seed)
        state.known = np.zeros(classes, np.uint8)
        return state

    def dispatch(self, state: FedGenState, round: Round) -> list[Task]:
        known = {"generator": state.generator, "known": {"labels": state.known}} if state.known.any() else {}
        return to_all(state.model, round, extras=known, returns={"labels": {"counts": (state.known.shape, "int64")}})

    def step(self, state: FedGenState, round: Round, uploads: list[Upload], sent: Arrays) -> dict[str, float]:
        counts = np.array([credible(u.extras["labels"]["counts"], u.num_examples) for u in uploads])
        if not counts.any():
            return {}
        state.known = state.known | (counts.sum(0) > 0).astype(np.uint8)
        return {"generator_loss": self.train_generator(state, round, counts, [u.arrays for u in uploads])}

    def train_generator(self, state: FedGenState, round: Round, counts: Matrix, models: list[Arrays]) -> float:
        """Take the round's Adam steps on the heads of `models` with label counts (k, classes); return the last loss."""
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
                leaves = {name: generator[name].requires_grad_() for name in TRAINED}
                z = generate(generator, noise, y, len(total), train=True)
                loss = teacher_loss(z, y, weight, bias, shares) + p.diversity * diversity_loss(noise, z)
                slopes = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values()))))
                adam(generator, slopes, moments, before + step + 1, lr, p.generator_weight_decay)
        finally:
            torch.set_num_threads(threads)
        state.generator, state.moments = as_arrays(generator), as_arrays(moments)
        return float(loss.detach())
