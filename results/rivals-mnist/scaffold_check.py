"""SCAFFOLD (option II, no momentum) in plain torch, sharing nothing with fedcross: does the method itself diverge here?

::

    python results/rivals-mnist/scaffold_check.py DATA LEARNING_RATE ROUNDS [CLIP]

DATA holds torchvision's MNIST. Prints each fifth round the accuracy, and of the client that walked farthest its steps
tau, |c - c_i|, largest gradient, |w - G| and |c_i+|.
"""

import sys

import numpy as np
import torch
from torch.nn import Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torchvision.datasets import MNIST

CLIENTS, DRAWN, BATCH = 100, 10, 50


def deal(labels: np.ndarray, rng: np.random.Generator) -> list[list[int]]:
    """Return each client's examples: Dirichlet 0.5, at least 10 each."""
    while True:
        parts: list[list[int]] = [[] for _ in range(CLIENTS)]
        for label in range(10):
            indices = rng.permutation(np.where(labels == label)[0])
            cuts = (np.cumsum(rng.dirichlet([0.5] * CLIENTS)) * len(indices)).astype(int)[:-1]
            for part, piece in zip(parts, np.split(indices, cuts)):
                part += piece.tolist()
        if min(map(len, parts)) >= 10:
            return parts


def main() -> None:
    """Run it."""
    root, lr, rounds = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    clip = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    train, test = MNIST(root, train=True), MNIST(root, train=False)
    x, x_test = (((s.data.float() / 255 - 0.1307) / 0.3081)[:, None] for s in (train, test))
    parts = deal(train.targets.numpy(), rng)
    head = [Conv2d(1, 6, 5), ReLU(), MaxPool2d(2), Conv2d(6, 16, 5), ReLU(), MaxPool2d(2), Flatten()]
    net = Sequential(*head, Linear(256, 120), ReLU(), Linear(120, 84), ReLU(), Linear(84, 10))
    params = list(net.parameters())
    model = parameters_to_vector(params).detach().clone()
    mean_variate, variates = torch.zeros_like(model), [torch.zeros_like(model) for _ in range(CLIENTS)]
    for number in range(1, rounds + 1):
        trained, change, told = [], torch.zeros_like(model), []
        for i in rng.choice(CLIENTS, DRAWN, replace=False):
            w, correction, steepest, steps = model.clone(), mean_variate - variates[i], 0.0, 0
            order = rng.permutation(parts[i])
            for start in range(0, len(order), BATCH):
                rows = order[start : start + BATCH]
                vector_to_parameters(w.clone(), params)
                slopes = torch.autograd.grad(F.cross_entropy(net(x[rows]), train.targets[rows]), params)
                gradient = torch.cat([slope.flatten() for slope in slopes])
                steepest, step = max(steepest, gradient.norm().item()), gradient + correction
                if clip:
                    step = step * (clip / step.norm()).clamp(max=1)
                w, steps = w - lr * step, steps + 1
            new = variates[i] - mean_variate + (model - w) / (steps * lr)
            told.append((steps, correction.norm().item(), steepest, (w - model).norm().item(), new.norm().item()))
            change, variates[i] = change + new - variates[i], new
            trained.append(w)
        model, mean_variate = torch.stack(trained).mean(0), mean_variate + change / CLIENTS
        if number % 5 == 0:
            vector_to_parameters(model.clone(), params)
            with torch.no_grad():
                accuracy = (net(x_test).argmax(1) == test.targets).float().mean().item()
            tau, off, steepest, way, new = max(told, key=lambda one: one[3])
            numbers = f"tau {tau}, |c-c_i| {off:.2f}, gradient {steepest:.1f}, |w-G| {way:.2f}, |c_i+| {new:.2f}"
            print(f"{number}: {accuracy:.3f}; {numbers}", flush=True)


if __name__ == "__main__":
    main()
