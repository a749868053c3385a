"""A trained network as a file that runs without fedcross: ONNX and TorchScript, checked against the network itself."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.extras import install
from fedcross.core.private_files import write_atomically
from fedcross.server.commands.export_notes import EXTRA
from fedcross.tasks.models._recurrent import LastStepLSTM
from fedcross.tasks.models.pooling import MaxPool2

#: File format -> the end of the file's name.
SUFFIX = {"safetensors": ".safetensors", "onnx": ".onnx", "torchscript": ".pt"}
#: Names of the network's input and output in an ONNX file.
INPUT, OUTPUT = "inputs", "scores"
#: Largest difference between scores of the file and of the network, relative to the largest score (at least 1).
TOLERANCE = 1e-4
#: Sizes of the batches with which a file is checked; the first traces the network.
BATCHES = (2, 5)
#: Warnings of torch's exporters about torch's own code: category, start of the message.
NOISE: tuple[tuple[type[Warning], str], ...] = (
    (DeprecationWarning, r"`torch\.jit\."),
    (FutureWarning, r"`torch\.jit\."),
    (DeprecationWarning, r"You are using the legacy TorchScript-based ONNX export"),
    (DeprecationWarning, r"The feature will be removed"),
    (UserWarning, r"Exporting a model to ONNX with a batch_size other than 1"),
    (FutureWarning, r"`isinstance\(treespec, LeafSpec\)`"),
    (FutureWarning, r"`is_gradient_checkpointing`"),  # of transformers, whose attributes the tracer reads one by one
)


class _LastStep(nn.Module):
    """The last step of an LSTM's output."""

    def forward(self, found: tuple[Tensor, object]) -> Tensor:
        """Return (batch, width) of (batch, length, width) and the LSTM's state."""
        return found[0][:, -1]


def plain(network: nn.Module) -> nn.Module:
    """Return a copy of `network` on the CPU in evaluation mode, with torch's own layers in place of fedcross's."""
    copied = copy.deepcopy(network).cpu().eval()
    for name, layer in list(copied.named_modules()):
        if isinstance(layer, MaxPool2):
            own: nn.Module = nn.MaxPool2d(2)
        elif isinstance(layer, LastStepLSTM):
            layer.__class__ = nn.LSTM  # type: ignore[assignment]
            own = nn.Sequential(layer, _LastStep())
        else:
            continue
        parent, _, child = name.rpartition(".")
        setattr(copied.get_submodule(parent), child, own)
    return copied


def write(kind: str, network: nn.Module, inputs: Callable[[int], Tensor], path: Path, notes: Mapping[str, str]) -> None:
    """Write `network` to `path`, after a check that the file computes the network's scores for two sizes of batch.

    Until that is known, the file is in memory only: one that has the name `path` already stays as it is.

    Parameters
    ----------
    kind : {"onnx", "torchscript"}
        Format of the file.
    network : Module
        From inputs (batch, ...) to scores (batch, classes).
    inputs : callable
        Number of examples to inputs of the task's shape and dtype.
    path : Path
        The file to write.
    notes : mapping of str
        What the file says of its inputs and scores (:mod:`.export_notes`).

    Raises
    ------
    ConfigError
        If a package is missing, or the exporter cannot express the network.
    StorageError
        If the file gives other scores than the network.
    OSError
        If `path` cannot be written.
    """
    writer, reader = {"onnx": (_onnx, _onnx_scores), "torchscript": (_script, _script_scores)}[kind]
    model = plain(network)
    try:
        with torch.no_grad(), _quiet():
            content = writer(model, inputs(BATCHES[0]), notes)
    except ImportError as error:
        raise ConfigError(f"--format {kind}: {error.name} is not installed. {install('onnx')}.") from error
    except (RuntimeError, torch.onnx.OnnxExporterError) as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise ConfigError(
            f"--format {kind}: the exporter of torch cannot write this network ({said[0][:200]}). Take another one."
        ) from error
    for size in BATCHES:
        batch = inputs(size)
        with torch.no_grad(), _quiet():
            expected, found = model(batch), reader(content, batch)
        difference = float((found - expected).abs().max() / expected.abs().max().clamp(min=1))
        if not difference <= TOLERANCE:
            raise StorageError(
                f"--format {kind}: for {size} examples the file's scores are off by {difference:.2g}. "
                "Nothing was written; choose another format."
            )
    write_atomically(path, content)


def loading_network(kind: str, path: Path, inputs: Tensor) -> str:
    """Return Python code that loads a file of :func:`write` and computes the scores of a batch like `inputs`."""
    shape, dtype = tuple(inputs.shape), str(inputs.dtype).removeprefix("torch.")
    prepared = "# a batch of any size, prepared as the notes say"
    if kind == "onnx":
        return (
            "import numpy as np\nimport onnxruntime\n\n"
            f"session = onnxruntime.InferenceSession({str(path)!r})\n"
            "print(session.get_modelmeta().custom_metadata_map)  # notes: how inputs are prepared, names of classes\n"
            f"inputs = np.zeros({shape}, np.{dtype})  {prepared}\n"
            f"scores = session.run(None, {{{INPUT!r}: inputs}})[0]\nprint(scores.shape)"
        )
    return (
        f"import torch\n\nnotes = {{{EXTRA!r}: ''}}  # how inputs are prepared, names of classes\n"
        f"network = torch.jit.load({str(path)!r}, _extra_files=notes)\nprint(notes)\n"
        f"inputs = torch.zeros({shape}, dtype=torch.{dtype})  {prepared}\nprint(network(inputs).shape)"
    )


def loading_weights(path: Path, run: Path, data_root: str | None = None, width: str | None = None) -> str:
    """Return Python code that loads a file of weights into the network of its run."""
    root = "" if data_root is None else f", {data_root!r}"
    return (
        "import fedcross\nfrom safetensors.torch import load_file\n\n"
        f"network = fedcross.load({str(run)!r}{root}).{'model' if width is None else f'slice({width!r})'}\n"
        f"network.load_state_dict(load_file({str(path)!r}))"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out the warnings of :data:`NOISE`, and those of the tracer about values that it takes for constants.

    :func:`write` checks what the tracer warns about, with batches of two sizes.
    """
    with warnings.catch_warnings():
        for category, message in NOISE:
            warnings.filterwarnings("ignore", message, category)
        warnings.filterwarnings("ignore", category=torch.jit.TracerWarning)  # type: ignore[attr-defined]
        yield


def _onnx(model: nn.Module, inputs: Tensor, notes: Mapping[str, str]) -> bytes:
    """Return the ONNX file of `model`, with `notes` in its ``metadata_props``."""
    import onnx

    proto: Any
    if any(isinstance(layer, nn.RNNBase) for layer in model.modules()):
        # The new exporter writes a loop over the steps; the older one ONNX's own LSTM, which is small and fast.
        axes = {INPUT: {0: "batch"}, OUTPUT: {0: "batch"}}
        file = io.BytesIO()
        torch.onnx.export(
            model,
            (inputs,),
            file,  # type: ignore[arg-type]
            dynamo=False,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_axes=axes,
        )
        proto = onnx.load_from_string(file.getvalue())
    else:
        batch = torch.export.Dim("batch", min=1)
        program: Any = torch.onnx.export(
            model,
            (inputs,),
            dynamo=True,
            input_names=[INPUT],
            output_names=[OUTPUT],
            dynamic_shapes=({0: batch},),
            verbose=False,
        )
        proto = program.model_proto
    onnx.helper.set_model_props(proto, dict(notes))
    content: bytes = proto.SerializeToString()
    return content


def _onnx_scores(content: bytes, inputs: Tensor) -> Tensor:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {INPUT: inputs.numpy()})[0])


def _script(model: nn.Module, inputs: Tensor, notes: Mapping[str, str]) -> bytes:
    """Return the TorchScript file of `model`, with `notes` beside it."""
    traced = torch.jit.trace(model, (inputs,), check_trace=False)  # type: ignore[no-untyped-call]
    file = io.BytesIO()  # a disk that is full, torch.jit.save would answer by ending the process
    torch.jit.save(traced, file, _extra_files={EXTRA: json.dumps(dict(notes))})
    return file.getvalue()


def _script_scores(content: bytes, inputs: Tensor) -> Tensor:
    found: torch.Tensor = torch.jit.load(io.BytesIO(content))(inputs)  # type: ignore[no-untyped-call]
    return found
