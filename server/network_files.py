"""A trained network as an ONNX or TorchScript file, checked against the network itself."""

from __future__ import annotations

import copy
import io
import json
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.extras import install

if TYPE_CHECKING:
    from fedcross.tasks.base import Task

#: Largest difference between scores of the file and of the network, relative to the largest score (at least 1).
TOLERANCE = 1e-4
#: Sizes of the batches with which a file is checked; the first one traces the network.
BATCHES = (2, 5)


def _inputs(task: Task, count: int) -> Tensor:
    """Return prepared inputs of the task, (count, ...): its first test inputs, random ones if it has too few."""
    raw = task.test.x[:count]
    if len(raw) < count:
        draws, shape = np.random.default_rng(0), (count, *task.shape)
        numbers = draws.integers(0, task.vocabulary or 256, shape) if raw.dtype.kind in "iu" else draws.random(shape)
        raw = numbers.astype(task.test.x.dtype)
    found: Tensor = task.prepare(raw)
    return found


def file_of(kind: str, network: nn.Module, task: Task) -> bytes:
    """Return the file of `network`, after a check that it computes the network's scores for two sizes of batch."""
    writer, reader = {"onnx": (_onnx, _onnx_scores), "torchscript": (_script, _script_scores)}[kind]
    model = _plain(network)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporters about torch's own code
        try:
            content = writer(model, _inputs(task, BATCHES[0]), notes(task))
        except ImportError as error:
            raise ConfigError(f"--format {kind}: {error.name} is not installed. {install('onnx')}.") from error
        except (RuntimeError, torch.onnx.OnnxExporterError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
            raise ConfigError(f"--format {kind}: torch's exporter cannot write this network ({said}).") from error
        for size in BATCHES:
            batch = _inputs(task, size)
            expected, found = model(batch), reader(content, batch)
            difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
            if not difference <= TOLERANCE:
                raise StorageError(f"--format {kind}: scores differ by {difference:.2g}. Nothing was written.")
    return content


def notes(task: Task) -> dict[str, str]:
    """Return how raw examples become inputs and what the scores mean, as JSON texts for the file's metadata."""
    from fedcross.tasks.reading.params import Normalise

    prepare = task.prepare
    found: dict[str, Any] = {"shape": list(task.shape), "number_of_classes": task.classes}
    found |= {"classes": list(task.label_names), "features": list(task.feature_names)}
    told = {"task": task.name}
    if isinstance(prepare, Normalise):
        told |= {"inputs": "float32", "prepare": "inputs = (raw / scale - mean) / std"}
        found |= {"scale": prepare.scale, "mean": prepare.mean, "std": prepare.std}
    elif task.vocabulary:
        told |= {"inputs": "int64", "prepare": "inputs = token ids, 0 is padding"}
        found["vocabulary"] = task.vocabulary
    return told | {name: json.dumps(value) for name, value in found.items() if value != []}


class _LastStep(nn.Module):
    """The last step of an LSTM's output."""

    def forward(self, found: tuple[Tensor, object]) -> Tensor:
        """Return (batch, width) of (batch, length, width) and the LSTM's state."""
        return found[0][:, -1]


def _plain(network: nn.Module) -> nn.Module:
    """Return a copy of `network` on the CPU in evaluation mode, with torch's own layers in place of fedcross's."""
    from fedcross.tasks.models._recurrent import LastStepLSTM
    from fedcross.tasks.models.pooling import MaxPool2

    copied = copy.deepcopy(network).cpu().eval()
    for name, layer in list(copied.named_modules()):
        if isinstance(layer, LastStepLSTM):
            layer.__class__ = nn.LSTM  # type: ignore[assignment]
            replaced: nn.Module = nn.Sequential(layer, _LastStep())
        elif isinstance(layer, MaxPool2):
            replaced = nn.MaxPool2d(2)
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, replaced)
    return copied


def _onnx(model: nn.Module, inputs: Tensor, metadata: dict[str, str]) -> bytes:
    import onnx

    names: dict[str, Any] = {"input_names": ["inputs"], "output_names": ["scores"]}
    if any(isinstance(layer, nn.RNNBase) for layer in model.modules()):
        # The new exporter writes a loop over the steps; the older one ONNX's own LSTM, which is small and fast.
        file, axes = io.BytesIO(), {"inputs": {0: "batch"}, "scores": {0: "batch"}}
        torch.onnx.export(model, (inputs,), file, dynamo=False, dynamic_axes=axes, **names)  # type: ignore[arg-type]
        proto: Any = onnx.load_from_string(file.getvalue())
    else:
        batch = torch.export.Dim("batch", min=1)
        shapes = ({0: batch},)
        program: Any = torch.onnx.export(model, (inputs,), dynamo=True, dynamic_shapes=shapes, verbose=False, **names)
        proto = program.model_proto
    onnx.helper.set_model_props(proto, metadata)
    content: bytes = proto.SerializeToString()
    return content


def _onnx_scores(content: bytes, inputs: Tensor) -> Tensor:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"inputs": inputs.numpy()})[0])


def _script(model: nn.Module, inputs: Tensor, metadata: dict[str, str]) -> bytes:
    traced = torch.jit.trace(model, (inputs,), check_trace=False)  # type: ignore[no-untyped-call]
    file = io.BytesIO()
    torch.jit.save(traced, file, _extra_files={"fedcross.json": json.dumps(metadata)})
    return file.getvalue()


def _script_scores(content: bytes, inputs: Tensor) -> Tensor:
    found: Tensor = torch.jit.load(io.BytesIO(content))(inputs)  # type: ignore[no-untyped-call]
    return found
