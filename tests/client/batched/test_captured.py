"""Recorded steps of many clients against the sequential trainer; a tape repeats operations as a CUDA graph does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedcross.client.batched import captured, trainer
from fedcross.client.batched.captured import Together
from fedcross.client.batched.state import alike, fitting
from fedcross.client.batched.trainer import train_batched
from fedcross.client.flat_model import ModuleNet
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Batch, Net, Objective, Prepared, Tensors, Visit
from fedcross.tasks.models._split import Split
from tests.client.batched.test_trainer import EXACT, agree, one_by_one
from tests.client.test_captured import OBJECTIVES, Counting, Reading, as_bytes, noisy
from tests.client.test_outside import Switched
from tests.support import visits as v
from tests.support.tape import TapeRecorder, WarmRecorder


def rounds(net: ModuleNet, *sizes: tuple[int, ...]) -> list[list[Visit]]:
    """Return the visits of several rounds, whose clients have these numbers of examples."""
    return [[v.visit(net, 10 * r + i, n, lr=0.1 / (i + 1)) for i, n in enumerate(own)] for r, own in enumerate(sizes)]


def compared(
    net: ModuleNet, objective: Objective, visits: list[list[Visit]], augment: Any = None, **changes: Any
) -> tuple[Together, TapeRecorder]:
    """Train every round with recorded steps and one client after the other; assert that the results agree."""
    recorder = TapeRecorder()
    together = Together(net, objective, record=recorder)
    for clients in visits:
        expected = one_by_one(net, objective, clients, augment, **changes)
        works = [v.work(net, objective, client) for client in clients]
        found = train_batched(net, objective, works, v.settings(**changes), augment, together=together)
        for a, b in zip(found, expected, strict=True):
            agree(a, b, EXACT)
    return together, recorder


@pytest.mark.slow
@pytest.mark.parametrize("layers", ["", "norm dropout"])
@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES)
def test_one_recording_serves_all_rounds(objective: Objective, layers: str) -> None:
    """Clients of unequal size: short batches at every step, and some finish before the others."""
    net = v.small_net(norm="norm" in layers, dropout="dropout" in layers)
    together, recorder = compared(net, objective, rounds(net, (12, 5, 7), (3, 8, 6), (9, 9, 2)))
    assert together.refused is None
    assert recorder.recordings == 1
    assert recorder.replays >= 6 + 4 + 6 - 3  # all steps but the first of those rounds that compare


class Spare(nn.Module):
    """Has a weight that nothing depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_a_weight_without_a_gradient_decays_as_in_the_sequential_trainer() -> None:
    torch.manual_seed(7)
    net = ModuleNet(Split(nn.Sequential(nn.Flatten(), Spare()), nn.Linear(72, 3)).double(), v.CPU)
    together, recorder = compared(net, Objective(Settings()), rounds(net, (9, 5), (7, 6)))
    assert together.refused is None
    assert recorder.recordings == 1


class Table(Objective):
    """Compares scores with all rows of a table; ``visit.config`` says how many it has."""

    def prepare(self, visit: Visit) -> Prepared:
        rows = int(visit.config["rows"])
        return {"table": torch.linspace(-1, 1, rows * visit.classes, dtype=visit.x.dtype).view(rows, visit.classes)}

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        scores = net.logits(params, buffers, batch.x)
        apart = ((scores[:, None] - prepared["table"]) ** 2).sum(2)
        return batch.mean(torch.logsumexp(apart, 1)) + super().loss(net, params, buffers, batch, prepared)


@pytest.mark.slow
def test_prepared_tensors_of_other_lengths_are_not_padded() -> None:
    """Neither from client to client nor, in a recording, from round to round."""
    net, objective = v.small_net(), Table(Settings())
    lengths = ((5, 3, 2), (3, 3, 3), (2, 2, 2))
    clients = [[v.visit(net, i, 6, config={"rows": n}) for i, n in enumerate(own)] for own in lengths]
    plain = one_by_one(net, objective, clients[0])
    works = [v.work(net, objective, client) for client in clients[0]]
    for a, b in zip(train_batched(net, objective, works, v.settings()), plain, strict=True):
        agree(a, b, EXACT)
    together, recorder = compared(net, objective, clients)
    assert together.refused is None
    assert recorder.recordings == 5  # of one client with 5, 3 and 2 rows, and of three with 3 and with 2


def test_larger_clients_and_other_numbers_of_them_are_recorded_anew() -> None:
    net = v.small_net()
    together, recorder = compared(net, Objective(Settings()), rounds(net, (4, 5), (9, 5), (9, 5, 2)))
    assert together.refused is None
    assert recorder.recordings == 3


def test_batch_norm_of_a_single_row_keeps_its_statistics() -> None:
    """One real row of vectors has no variance (0 / 0), which would be in the client's model from then on."""
    torch.manual_seed(7)
    layers = [nn.Flatten(), nn.Linear(72, 4), nn.BatchNorm1d(4), nn.ReLU()]
    net = ModuleNet(Split(nn.Sequential(*layers), nn.Linear(4, 3)).double(), torch.device("cpu"))
    objective, size = Objective(Settings()), v.settings().batch
    together = Together(net, objective, record=TapeRecorder())
    works = [v.work(net, objective, v.visit(net, i, n)) for i, n in enumerate((2 * size + 1, 2 * size))]
    odd, even = train_batched(net, objective, works, v.settings(epochs=1), together=together)
    assert together.refused is None
    for trained in (odd, even):
        assert all(bool(one.isfinite().all()) for one in [trained.flat, *trained.buffers.values()])
        assert float((trained.buffers["features.2.running_var"] - 1).abs().max()) > 0


@pytest.mark.parametrize("sizes", [(3, 2), (8, 5)])
def test_rounds_of_fewer_steps_than_a_warm_up_are_recorded(sizes: tuple[int, ...]) -> None:
    net, objective, recorder = v.small_net(), Objective(Settings()), WarmRecorder()
    together, changes = Together(net, objective, record=recorder), {"epochs": 1, "batch": 4}
    for clients in rounds(net, sizes, sizes, sizes):
        expected = one_by_one(net, objective, clients, **changes)
        works = [v.work(net, objective, client) for client in clients]
        for a, b in zip(train_batched(net, objective, works, v.settings(**changes), together=together), expected):
            agree(a, b, EXACT)
    assert together.refused is None
    assert recorder.recordings == 1
    assert recorder.replays >= 1


def test_augments_with_the_draws_of_the_sequential_trainer() -> None:
    net = v.small_net(norm=True)
    together, _ = compared(net, Objective(Settings()), rounds(net, (6, 9), (9, 3)), noisy)
    assert together.refused is None


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: out of memory")],
    ids=["torch", "driver"],
)
def test_one_that_ran_out_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch, error: RuntimeError) -> None:
    """Two clients at once fit, four do not; the recording of four is given up with its memory."""
    net, objective, recorder = v.small_net(), Objective(Settings()), TapeRecorder()
    together, tried = Together(net, objective, record=recorder), []
    real = captured._Stage._step

    def small(stage: captured._Stage) -> None:
        tried.append(len(stage._state.flat))
        if tried[-1] > 2:
            raise error
        real(stage)

    monkeypatch.setattr(captured._Stage, "_step", small)
    (clients,) = rounds(net, (5, 12, 7, 3))
    works = [v.work(net, objective, client) for client in clients]
    for number in range(3):
        tried.clear()
        found = train_batched(net, objective, works, v.settings(), together=together)
        assert (4 in tried) == (number == 0)
        assert set(tried) <= {4, 2}
        for a, b in zip(found, one_by_one(net, objective, clients), strict=True):
            agree(a, b, EXACT)
    assert together.refused is None
    assert recorder.recordings == 2  # the one of four that failed, and that of two
    assert [name[1] for name in together._recordings._stages] == [2]


def test_too_little_memory_to_record_one_client_leaves_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    net, objective = v.small_net(), Objective(Settings())
    monkeypatch.setattr(captured._Stage, "_step", full)
    together, _ = compared(net, objective, rounds(net, (5, 7)))
    assert together.refused == "the device's memory is too small for a recorded step"


def test_as_many_clients_train_at_once_in_every_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recording takes memory itself; measured again, there would be room for fewer, who need a new one."""
    free = iter([2, 1, 1])
    monkeypatch.setattr(trainer, "fitting", lambda *_: next(free))
    net = v.small_net()
    sizes = (5, 12, 7, 3)
    together, recorder = compared(net, Objective(Settings()), rounds(net, sizes, sizes))
    assert recorder.recordings == 1
    assert together.refused is None
    works = [v.work(net, Objective(Settings()), client) for client in rounds(net, sizes)[0]]
    assert together.at_once(works[0], v.settings(batch=2), 4, lambda: next(free)) == 1  # measured after making room
    assert together._recordings._stages == {}


def test_results_are_copies() -> None:
    """Clients that do not fit into memory together use the same stage one after the other."""
    net, objective = v.small_net(), Objective(Settings())
    together = Together(net, objective, record=TapeRecorder())
    works = [v.work(net, objective, v.visit(net, i, 6)) for i in range(3)]
    found = train_batched(net, objective, works, v.settings(), memory=1, together=together)
    for a, b in zip(found, train_batched(net, objective, works, v.settings()), strict=True):
        agree(a, b, EXACT)


@pytest.mark.slow
def test_what_cannot_be_recorded_is_trained_without() -> None:
    for kind, reason in ((Reading, "a step cannot be recorded"), (Counting, "differs from visit to visit")):
        net = v.small_net()
        objective = kind(Settings())
        visits = rounds(net, *([(5, 7)] * 9)) if kind is Counting else rounds(net, (5, 7))
        if kind is Reading:  # vmap refuses what reads a number, with and without a recording
            with pytest.raises(RuntimeError, match=r"vmap|item"):
                compared(net, objective, visits)
            continue
        together, _ = compared(net, objective, visits)
        assert reason in str(together.refused)


@pytest.mark.slow
@pytest.mark.parametrize("augment", [None, noisy])
@pytest.mark.parametrize("graph", [False, True])
def test_bytes_are_looked_up_and_prepared_in_each_step(augment: Any, graph: bool) -> None:
    """Stacks of bytes give what stacks of prepared inputs give, to the bit, called and recorded."""
    net, objective = v.small_net(dtype=torch.float32), OBJECTIVES["taught"]
    pairs = [as_bytes(v.visit(net, i, n)) for i, n in enumerate((9, 6, 3))]
    held, plain = ([v.work(net, objective, pair[i]) for pair in pairs] for i in (0, 1))
    results = []
    for works in (held, plain):
        together = Together(net, objective, record=TapeRecorder()) if graph else None
        results.append(train_batched(net, objective, works, v.settings(), augment, together=together))
        assert together is None or together.refused is None
    for a, b in zip(*results, strict=True):
        assert torch.equal(a.flat, b.flat)
        assert a.loss == b.loss


def test_bytes_and_prepared_inputs_are_not_stacked() -> None:
    """A partition may change the pictures of some clients to numbers."""
    net, objective = v.small_net(dtype=torch.float32), Objective(Settings())
    pairs = [as_bytes(v.visit(net, i, 6)) for i in range(3)]
    mixed = [v.work(net, objective, pairs[i][i % 2]) for i in range(3)]
    assert alike(mixed, frozenset()) == [[0, 2], [1]]
    found = train_batched(net, objective, mixed, v.settings())
    for a, b in zip(found, one_by_one(net, objective, [pair[1] for pair in pairs]), strict=True):
        torch.testing.assert_close(a.flat, b.flat, rtol=0, atol=1e-5)


def test_the_memory_of_a_client_counts_its_bytes() -> None:
    """1,000 pictures of 2x6x6 pixels, where they lie and in the stack: 144,000 bytes, or 576,000 as float32."""
    net, objective, memory = v.small_net(dtype=torch.float32), Objective(Settings()), 10**10
    held, plain = (v.work(net, objective, one) for one in as_bytes(v.visit(net, 0, 1000)))
    each = [memory / fitting(net, objective, work, 4, memory) for work in (held, plain)]
    assert each[1] - each[0] == pytest.approx(576_000 - 144_000, rel=1e-3)


@pytest.mark.slow
def test_a_weight_that_is_switched_on_between_rounds_is_recorded_anew() -> None:
    net, objective = v.small_net(), Switched(lambda *_: None)
    recorder = TapeRecorder()
    together = Together(net, objective, record=recorder)
    for number, clients in enumerate(rounds(net, *[(9, 5)] * 4)):
        objective.weight = 0.5 * (number == 2)
        expected = one_by_one(net, objective, clients)
        works = [v.work(net, objective, client) for client in clients]
        found = train_batched(net, objective, works, v.settings(), together=together)
        for a, b in zip(found, expected, strict=True):
            agree(a, b, EXACT)
    assert together.refused is None
    assert recorder.recordings == 3
