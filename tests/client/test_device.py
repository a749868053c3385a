"""What a GPU needs that a CPU does not notice; the driver is emulated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcross.client import device
from fedcross.client.batched import trainer as batched
from fedcross.core.errors import ConfigError, DeviceError
from fedcross.core.settings import Settings
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.engines.grid import answer, identify
from fedcross.strategies.objective import Objective
from tests.support import visits as v
from tests.support.toy import app, message

CPU = torch.device("cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Emulate a driver with two GPUs; return the devices that become current."""
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.delenv(device.DEVICE, raising=False)
    return current


@pytest.mark.parametrize(("name", "number"), [("auto", 0), ("cuda", 0), ("cuda:1", 1)])
def test_a_gpu_has_a_number_and_becomes_current(driver: list[torch.device], name: str, number: int) -> None:
    assert device.pick_device(name) == torch.device("cuda", number)
    assert driver == [torch.device("cuda", number)]


def test_a_site_has_a_device_of_its_own(driver: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration says cuda, and this machine has no GPU."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match="FEDCROSS_DEVICE=cpu if only this machine has none"):
        device.pick_device("cuda")
    monkeypatch.setenv(device.DEVICE, "cpu")
    assert device.pick_device("cuda") == CPU
    monkeypatch.setenv(device.DEVICE, "gpu")
    with pytest.raises(ConfigError, match="FEDCROSS_DEVICE='gpu': not a device"):
        device.pick_device("cuda")


@pytest.mark.parametrize(("precision", "narrow"), [("float32", False), ("tf32", True), ("bfloat16", False)])
def test_float32_is_float32_on_a_gpu(monkeypatch: pytest.MonkeyPatch, precision: str, narrow: bool) -> None:
    """torch's own default computes convolutions in TF32."""
    fixed: list[bool] = []
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda on, *, warn_only: fixed.append(on and warn_only))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    before, matmul, repeats = (
        torch.backends.cudnn.allow_tf32,
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.deterministic,
    )
    settings, fills = (
        v.settings(precision=precision, deterministic=precision == "tf32"),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    try:
        device.set_arithmetic(CPU, settings)
        assert torch.utils.deterministic.fill_uninitialized_memory == fills
        assert torch.backends.cudnn.allow_tf32 == before
        assert fixed == []
        device.set_arithmetic(torch.device("cuda:0"), settings)
        assert torch.backends.cudnn.allow_tf32 == torch.backends.cuda.matmul.allow_tf32 == narrow
        assert torch.backends.cudnn.deterministic == (precision == "tf32")
        assert fixed == [precision == "tf32"]
        assert not torch.utils.deterministic.fill_uninitialized_memory  # a kernel more for each new tensor
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fills
        torch.backends.cudnn.allow_tf32 = before
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.deterministic = repeats


@pytest.mark.parametrize(
    ("error", "memory", "broken"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True, False),
        (RuntimeError("CUDA error: out of memory"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"), True, False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`"), False, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), True, False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), True, False),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED"), True, False),
        (RuntimeError("cusolver error: CUSOLVER_STATUS_INTERNAL_ERROR"), False, False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False, True),
        (RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"), False, True),
        (torch.AcceleratorError("device-side assert triggered"), False, True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False, False),
        (ValueError("CUDA error"), False, False),
    ],
)
def test_which_errors_break_a_device(error: Exception, memory: bool, broken: bool) -> None:
    assert device.out_of_memory(error) == memory
    assert device.breaks_device(error) == broken
    with pytest.raises(DeviceError if broken else type(error)), device.device_errors():
        raise error


def failing(*_: Any) -> Any:
    raise DeviceError("The GPU failed.")


def test_a_broken_device_ends_the_process_that_trains() -> None:
    identify()
    content = RecordDict({"config": ConfigRecord({"client": 0})})
    context = Context(1, 1, {"partition-id": 0}, RecordDict(), {})
    with pytest.raises(DeviceError):
        answer(failing, Message(content, dst_node_id=1, message_type="train"), context)


def test_a_broken_device_ends_the_run_of_the_batched_engine() -> None:
    """Any other error is a fault of the clients, which a run outlives: they are asked one by one."""
    grid = BatchedGrid(app, 2, {}, failing, Params())
    with pytest.raises(DeviceError):
        grid.send_and_receive([message(0), message(1)])
    odd = BatchedGrid(ClientApp(), 2, {}, lambda *_: 1 / 0, Params())  # type: ignore[arg-type, return-value]
    assert [reply.has_error() for reply in odd.send_and_receive([message(0), message(1)])] == [True, True]


def test_too_little_memory_halves_the_stack_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    net, objective = v.small_net(), Objective(Settings())
    works = [v.work(net, objective, v.visit(net, i, n)) for i, n in enumerate((5, 12, 7, 3))]
    whole = batched.train_batched(net, objective, works, v.settings())
    tried: list[int] = []
    real = batched._Stack.train

    def small(self: Any, augment: Any) -> Any:
        tried.append(len(self.visits))
        if len(self.visits) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, augment)

    monkeypatch.setattr(batched._Stack, "train", small)
    freed: list[torch.device] = []
    monkeypatch.setattr(batched, "free_unused", freed.append)
    limit = 1
    for a, b in zip(batched.train_batched(net, objective, works, v.settings()), whole, strict=True):
        torch.testing.assert_close(a.flat, b.flat, rtol=0, atol=1e-10)
    assert tried == [4, 2, 1, 1, 1, 1]
    assert freed == [net.device, net.device]
    limit = 0
    with pytest.raises(torch.OutOfMemoryError):
        batched.train_batched(net, objective, works, v.settings())


def test_large_images_are_scored_in_small_batches_on_a_gpu_only() -> None:
    gpu = torch.device("cuda:0")
    assert device.evaluation_batch(gpu, 3 * 32 * 32) == 1000
    assert device.evaluation_batch(gpu, 3 * 224 * 224) == 111  # 2**24 / 150528
    assert device.evaluation_batch(gpu, 2**30) == 1
    assert device.evaluation_batch(CPU, 1) == device.evaluation_batch(CPU, 2**30) == device.CACHED


def test_a_model_whose_weights_have_moved_is_refused() -> None:
    net = v.small_net()
    arrays = {name: np.array(array) for name, array in net.read().items()}
    net.params["classifier.weight"].data = torch.zeros(3, 8, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"classifier\.weight lies outside the flat row"):
        net.load(arrays)
