"""``fedcross export``: writes a model from a checkpoint of a run, finished or still running.

``safetensors`` holds the weights. ONNX and TorchScript hold the network too, with how inputs are prepared and the names
of the classes as metadata; they need the shape of its inputs, from the data set or the task's settings.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import StorageError
from fedcross.server.export import export

#: Format -> Python that loads the file.
LOADS = {
    "safetensors": "network.load_state_dict(load_file({path!r}))  # network: fedcross.load(RUN).model",
    "onnx": "onnxruntime.InferenceSession({path!r}).run(None, {{'inputs': inputs}})",
    "torchscript": "torch.jit.load({path!r})(inputs)",
}


def main(arguments: Sequence[str]) -> int:
    """Write a model of a run; return the exit code."""
    line = argparse.ArgumentParser("fedcross export", description=(__doc__ or "").splitlines()[0])
    line.add_argument("run", type=Path, help="folder of a run")
    line.add_argument("--round", type=int, help="round of a checkpoint (default: the newest)")
    line.add_argument("--model", type=int, help="index of a middleware model, from 0 (default: the global model)")
    line.add_argument("--width", help="the global model of this width, as 0.4 or 0.4@2 (default: the widest)")
    line.add_argument("--out", type=Path, help="file to write (default: model-round-R.safetensors in RUN)")
    line.add_argument("--format", choices=LOADS, default="safetensors", help="weights (default), or the whole network")
    line.add_argument("--data-root", help="folder of the data sets, for onnx and torchscript (default: the run's)")
    asked = line.parse_args(arguments)
    if not asked.run.is_dir():
        raise StorageError(f"{asked.run}: no such run folder. Name the folder of a run.")
    path = export(asked.run, asked.round, asked.model, asked.out, asked.format, asked.data_root, asked.width)
    print(path)
    print(f"Load it with: {LOADS[asked.format].format(path=str(path))}", file=sys.stderr)
    return 0
