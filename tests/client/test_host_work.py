"""What a recording would keep as it was is refused before it, on the emulated GPU: from a user's own method, say."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import get_device_states

from fedcross.client import host_work
from fedcross.client.captured import Captured
from fedcross.client.flat_model import ModuleNet
from fedcross.client.host_work import NoHostWork, no_waiting
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Batch, Net, Objective, Prepared, Tensors
from fedcross.tasks.inputs import Inputs
from tests.support import visits as v
from tests.support.emulated_gpu import emulated_gpu

GPU = torch.device("cuda:0")
Extra = Callable[[Any, Tensor, Tensor], Tensor | float]


class Adding(Objective):
    """Adds something to the loss, from the loss of each example and the labels."""

    def __init__(self, extra: Extra) -> None:
        super().__init__(Settings())
        self.extra, self.count = extra, torch.zeros(())

    def loss(self, net: Net, params: Tensors, buffers: Tensors, batch: Batch, prepared: Prepared) -> Tensor:
        each = functional.cross_entropy(net.logits(params, buffers, batch.x), batch.y, reduction="none")
        return each.mean() + self.extra(self, each, batch.y)


def growing(own: Any, each: Tensor, _: Tensor) -> Tensor:
    """Give the loss a weight that grows from step to step by less than a comparison with a called step notices."""
    own.count += 1
    return each.mean() * 1e-4 * own.count


def cleared(_: Any, each: Tensor, y: Tensor) -> Tensor:
    copied = each.clone()
    copied[y > 0] = torch.zeros_like(each[:1])
    return copied.sum()


REFUSED: dict[str, tuple[Extra, str]] = {
    "a count on the CPU": (growing, "add_.Tensor computes with a tensor on the CPU"),
    "a weight on the CPU": (
        lambda own, each, y: each.sum() * own.count,
        "mul.Tensor computes with a tensor on the CPU",
    ),
    "a draw on the CPU": (lambda own, each, y: each.sum() * torch.rand(()), "rand.default draws on the CPU"),
    "a sum of labels": (lambda own, each, y: 0.0 * y.cpu().sum().to(GPU), "brings a result to the CPU"),
    "rows of the CPU": (lambda own, each, y: each[torch.arange(len(y))].sum(), "index with an index from the CPU"),
    "a list": (lambda own, each, y: each.new_tensor([1.0, 2.0]).sum(), "_to_copy to cuda"),
    "a list that nobody waits for": (
        lambda own, each, y: torch.tensor([1.0, 2.0]).to(GPU, non_blocking=True).sum(),
        "_to_copy.default copies from the CPU",
    ),
    "a list copied beside": (
        lambda own, each, y: torch.empty(2, device=GPU).copy_(torch.tensor([1.0, 2.0]), non_blocking=True).sum(),
        "copy_.default copies from the CPU",
    ),
    "a number": (lambda own, each, y: 0.0 * float(y.sum().item()), "_local_scalar_dense"),
    "rows of a mask": (lambda own, each, y: each[y > 0].sum(), "capturing: index"),
    "assignment by a mask": (cleared, "capturing: index_put_"),
    "a tensor where a mask is": (lambda own, each, y: each.masked_fill(y > 0, each.mean()).sum(), "masked_fill"),
    "masked_select": (lambda own, each, y: each.masked_select(y > 0).sum(), "masked_select"),
    "nonzero": (lambda own, each, y: each[(y > 0).nonzero()].sum(), "nonzero"),
    "bincount": (lambda own, each, y: 0.0 * torch.bincount(y, minlength=5).sum(), "bincount"),
    "unique": (lambda own, each, y: 0.0 * torch.unique(y).sum(), "_unique2"),
    "repeat_interleave": (lambda own, each, y: each.repeat_interleave(y).sum(), "repeat_interleave"),
    "multinomial": (lambda own, each, y: 0.0 * torch.multinomial(each.detach(), 2).sum(), "multinomial"),
    "inv": (lambda own, each, y: 0.0 * torch.linalg.inv(torch.eye(3, device=GPU)).sum(), "_linalg_check_errors"),
    "solve": (
        lambda own, each, y: 0.0 * torch.linalg.solve(torch.eye(3, device=GPU), torch.ones(3, device=GPU)).sum(),
        "_linalg_check_errors",
    ),
}
RECORDED: dict[str, Extra] = {
    "a number that becomes a tensor": lambda own, each, y: each.sum() * (torch.tensor(0.5) + 0.25),
    "a mask's rows as a product": lambda own, each, y: (each * (y > 0)).sum(),
    "a number where a mask is": lambda own, each, y: each.masked_fill(y > 0, 0.0).sum(),
    "rows repeated to a known length": lambda own, each, y: each.repeat_interleave(y * 0 + 1, output_size=4).sum(),
    "inv without a check": lambda own, each, y: torch.linalg.inv_ex(torch.eye(3, device=GPU))[0].sum() * each.sum(),
}


@pytest.mark.parametrize("name", [*REFUSED, *RECORDED])
def test_what_a_recording_would_keep_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """And what it would not keep is recorded."""
    extra, reason = REFUSED.get(name) or (RECORDED[name], "")
    with emulated_gpu(monkeypatch) as counted:
        net = ModuleNet(v.small_net(dtype=torch.float32).module, GPU)
        x = torch.linspace(-1, 1, 12 * 72).view(12, 2, 6, 6).to(GPU)
        one = v.visit(net, 0, 12, inputs=Inputs(x), y=(torch.arange(12) % 3).to(GPU))
        captured = Captured(net, Adding(extra))
        for _ in range(2):
            captured.train(one, {}, v.settings())
        if reason:
            assert re.search(rf"a step cannot be recorded \(.*{re.escape(reason)}", str(captured.refused))
        else:
            assert captured.refused is None
        assert (captured.replays > 0) == (counted.recorder.replays > 0) == (not reason)


def test_waits_are_errors_inside_a_block_only(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = [0]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with pytest.raises(RuntimeError), no_waiting():
        raise RuntimeError
    assert modes == [0, "error", 0]


def test_torchs_remark_on_its_switch_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU each process printed it at its first recording; warnings are errors here."""

    def switch(mode: str) -> None:
        if mode == "error":
            warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", switch)
    with no_waiting():
        pass


@pytest.mark.parametrize("owner", [torch.cuda, torch.cuda.Event, torch.cuda.Stream])
def test_waiting_for_nothing_but_the_gpu_is_an_error_too(monkeypatch: pytest.MonkeyPatch, owner: Any) -> None:
    """torch's switch does not know these: a user's clock in a step would end a recording half-way."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    before = owner.synchronize
    with pytest.raises(RuntimeError, match=r"synchronize\(\) waits for the GPU"), no_waiting():
        owner.synchronize()
    assert owner.synchronize is before


def test_a_checkpoint_is_refused_before_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for the state of the GPU's random numbers, which would end a recording, and all later ones with it."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    before = torch.cuda.get_rng_state, torch.cuda.random.set_rng_state
    with pytest.raises(RuntimeError, match=r"get_rng_state\(\) asks for .* preserve_rng_state=False"), no_waiting():
        get_device_states(Somewhere())
    with pytest.raises(RuntimeError, match=r"set_rng_state\(\) asks for"), no_waiting():
        torch.cuda.random.set_rng_state(torch.zeros(1))
    assert (torch.cuda.get_rng_state, torch.cuda.random.set_rng_state) == before


class Somewhere(Tensor):
    """A tensor on a GPU, for who only asks where it is."""

    is_cuda = True  # type: ignore[assignment]
    device = GPU  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


@pytest.fixture
def attention() -> Iterator[Any]:
    """An operation whose second result is where torch's attention has its seed outside of a recording: on the CPU."""
    library = torch.library.Library("emulated", "DEF")
    library.define("attention(Tensor q) -> (Tensor, Tensor)")
    library.impl("attention", lambda q: (torch.empty_like(q), torch.zeros((), dtype=torch.long)), "Meta")
    yield torch.ops.emulated.attention
    library._destroy()


def test_the_seed_of_attention_is_no_work_of_the_host(monkeypatch: pytest.MonkeyPatch, attention: Any) -> None:
    q = torch.empty(2, 4, 16, 8, device="meta")
    with pytest.raises(RuntimeError, match="brings a result to the CPU"), NoHostWork():
        attention(q)
    monkeypatch.setattr(host_work, "_SEEDED", {*host_work._SEEDED, attention})
    with NoHostWork():
        out, seed = attention(q)
        assert out.device.type == "meta"
        seed + 1  # what its backward pass does with it is no work of the host's either
    names = {str(one) for one in host_work._SEEDED}
    assert "aten._scaled_dot_product_efficient_attention" in names
