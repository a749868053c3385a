"""Models of a run for use elsewhere: rebuilt from a checkpoint; written as weights, ONNX or TorchScript."""

from __future__ import annotations

import copy
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor, nn

from fedcross.conf.schema import RunConfig, load
from fedcross.core.errors import ConfigError, StorageError, install
from fedcross.core.settings import quote, shown
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.evaluation import write_model
from fedcross.server.run_folder import saved_overrides, writing
from fedcross.server.run_setup import corners_for
from fedcross.strategies.method import Start
from fedcross.strategies.pool.pool import Arrays
from fedcross.strategies.round.driver import Driver
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings
from fedcross.tasks.base import Task
from fedcross.tasks.models._recurrent import LastStepLSTM
from fedcross.tasks.models.pooling import MaxPool2
from fedcross.tasks.models.weights import load_arrays
from fedcross.tasks.models.width import Width
from fedcross.tasks.reading.params import Normalise

#: File format -> the end of the file's name.
SUFFIX = {"safetensors": ".safetensors", "onnx": ".onnx", "torchscript": ".pt"}


def export(
    run: Path,
    number: int | None = None,
    model: int | None = None,
    out: Path | None = None,
    kind: str = "safetensors",
    data_root: str | None = None,
    width: float | str | None = None,
) -> Path:
    """Write a model of `run`, as round `number` (default: the newest checkpoint) left it; return the file's path.

    By default it is the widest global model. `model` is the index, from 0, of a middleware model; `width` that of
    another global model (``0.4@2`` keeps two groups whole). `kind` is a name of :data:`SUFFIX`: the weights, or the
    whole network from prepared inputs (batch, ...) to scores (batch, classes). `out` is by default
    ``model-round-NUMBER...`` in `run`; the data in `data_root` say the shape of a network's inputs.
    """
    if model is not None and width is not None:
        raise StorageError("--model and --width: a middleware model has its own width. Give one of them.")
    number, driver, identity = _checkpoint(run, number)
    arrays, size = _global(driver, width, run) if model is None else _middleware(driver, model, run)
    suffix = f"-{model}" if model is not None else f"-width-{width}" if width is not None else ""
    path = out or run / f"model-round-{number:06d}{suffix}{SUFFIX[kind]}"
    with writing(path, "or choose another --out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "safetensors":
            write_model(path, arrays, identity.get("tied", {}))
        else:
            path.write_bytes(file_of(kind, *_network(run, arrays, data_root, size)))
    return path


def network(run: Path, data_root: str | None = None, width: float | str | None = None) -> nn.Module:
    """Return the network of `run` with its final global weights, or of `width` from the newest checkpoint."""
    final, size = run / "model.safetensors", None
    if width is None and final.exists():
        try:
            arrays = load_file(final)
        except (OSError, SafetensorError, ValueError) as error:
            raise StorageError(f"{final}: damaged ({error}). fedcross resume={shown(run)} writes it again.") from error
    else:
        _, driver, _ = _checkpoint(run, None)
        arrays, size = _global(driver, width, run)
    return _network(run, arrays, data_root, size)[0].eval()


def _checkpoint(run: Path, number: int | None) -> tuple[int, Driver, dict[str, Any]]:
    """Return a round, the driver in its state at the checkpoint of that round, and the run's identity."""
    checkpoints = Checkpoints(run)
    if not (rounds := checkpoints.rounds()):
        raise StorageError(f"{run}: no checkpoint here. Name the folder of a run after its first checkpoint.")
    if number is None:
        number, packed, identity = checkpoints.latest()
    elif number in rounds:
        packed, identity = checkpoints.load(number)
    else:
        kept = ", ".join(map(str, rounds))
        raise StorageError(f"--round {number}: {run} has checkpoints of round {kept}. See checkpoint.milestone.")
    config = config_of(run, None)
    spec, trained = packed.values["model"], tuple(packed.values["parameters"])
    empty = {name: np.zeros(shape, dtype) for name, (shape, dtype) in spec.items()}
    corners = corners_for(config, _task(config)) if config.new_method().widths() else None
    start = Start(empty, trained, config.clients_per_round, config.rounds, config.seed, corners)
    driver = open_run(config.new_method(), start, RoundSettings.of(config, "", networked=False))
    checkpoints.restore(driver, packed, number)
    return number, driver, identity


def _global(driver: Driver, width: float | str | None, run: Path) -> tuple[Arrays, Width | None]:
    """Return the global model of `width`, and its width; of several with one ratio that with fewest whole groups."""
    if width is None:
        return driver.global_model(), None
    models = driver.evaluation().widths
    for size in sorted(models, key=lambda size: size.whole):
        if width in (size.text, f"{size.ratio:g}", size.ratio):
            return models[size], size
    known = ", ".join(size.text for size in models) or "one width"
    raise StorageError(f"width {width}: {run} has {known}. Name one of them, or leave it out.")


def _middleware(driver: Driver, model: int, run: Path) -> tuple[Arrays, Width | None]:
    pool = getattr(driver.state, "pool", None)
    if pool is None or not 0 <= model < len(pool):
        found = f"the middleware models 0 to {len(pool) - 1}" if pool is not None else "no middleware models"
        raise StorageError(f"--model {model}: {run} has {found}.")
    arrays: Arrays = pool.model(model)
    return arrays, pool.widths[model] if driver.ledger.widths else None


def config_of(run: Path, data_root: str | None) -> RunConfig:
    """Return the checked configuration of `run`."""
    return load([*saved_overrides(run), *([f"data_root={quote(data_root)}"] if data_root else [])])


def _network(run: Path, arrays: Arrays, data_root: str | None, size: Width | None) -> tuple[nn.Module, Task]:
    """Return the network of `run` for evaluation, of `size` or of the global model, with weights `arrays`; its task."""
    config = config_of(run, data_root)
    task, widths = _task(config), getattr(config.method, "widths", ())
    trained, _ = config.network(task, width=size or (Width(max(widths)) if widths else None))
    model = config.new_method().network(trained, deployed=True)
    try:
        load_arrays(model, arrays)
    except RuntimeError as error:
        raise StorageError(f"{run}: its weights do not fit its network ({error}). Was the model changed?") from error
    return model, task


def _task(config: RunConfig) -> Task:
    """Return the run's task, without examples where its settings say all about its inputs."""
    outline = getattr(config.module("task"), "outline", None)
    found: Task | None = outline(config.task) if outline else None
    return config.load_data().task if found is None else found


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
    prepare = task.prepare
    found: dict[str, Any] = {"shape": list(task.shape), "number_of_classes": task.classes}
    found |= {"classes": list(task.label_names), "features": list(task.feature_names)}
    texts = {"task": task.name}
    if isinstance(prepare, Normalise):
        texts |= {"inputs": "float32", "prepare": "inputs = (raw / scale - mean) / std"}
        found |= {"scale": prepare.scale, "mean": prepare.mean, "std": prepare.std}
    elif task.vocabulary:
        texts |= {"inputs": "int64", "prepare": "inputs = token ids, 0 is padding"}
        found["vocabulary"] = task.vocabulary
    return texts | {name: json.dumps(value) for name, value in found.items() if value != []}


class _LastStep(nn.Module):
    """The last step, (batch, width), of an LSTM's output, (batch, length, width) and a state."""

    def forward(self, found: tuple[Tensor, object]) -> Tensor:
        return found[0][:, -1]


def _plain(network: nn.Module) -> nn.Module:
    """Return a copy of `network` on the CPU in evaluation mode, with torch's own layers in place of fedcross's."""
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
        shapes = ({0: torch.export.Dim("batch", min=1)},)
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
