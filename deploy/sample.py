"""Data for a first run: the handwritten digits of scikit-learn, divided unevenly over a few devices.

Each device gets a folder of its own with ``data.npz``; the server's holds the test examples only.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedcross.core.errors import StorageError
from fedcross.core.files import replacing
from fedcross.deploy.keys import check_name
from fedcross.tasks import digits
from fedcross.tasks.partition import dirichlet

#: Dirichlet parameter of the class shares per device; with 0.5, each device has some nearly empty classes.
BETA = 0.5
SERVER = "server"
FILE = "data.npz"


def write(root: Path, devices: Sequence[str], seed: int = 1) -> list[Path]:
    """Write ``ROOT/DEVICE/data.npz`` for each device and ``ROOT/server/data.npz``; existing files stay.

    Inputs are float32 ``(n, 1, 8, 8)`` in [0, 1], labels 0 to 9.

    Raises
    ------
    ConfigError
        If a device's name is none, or the server's.
    StorageError
        If a file cannot be written.
    """
    for device in devices:
        check_name(device)
    task = digits.load(digits.Params())
    settings = {"clients": len(devices), "beta": BETA}
    owners = dirichlet.split(dirichlet.Params.model_validate(settings), task, seed).train
    written = []
    for device, indices in zip(devices, owners):
        path = root / device / FILE
        if not path.exists():
            _save(path, x=_scaled(task.train.x[indices]), y=task.train.y[indices])
            written.append(path)
    path = root / SERVER / FILE
    if not path.exists():
        _save(path, x_test=_scaled(task.test.x), y_test=task.test.y)
        written.append(path)
    return written


def _scaled(x: npt.NDArray[np.generic]) -> npt.NDArray[np.float32]:
    return np.asarray(x, dtype=np.float32) / np.float32(16)


def _save(path: Path, **arrays: npt.NDArray[np.generic]) -> None:
    try:
        if not path.parent.exists():
            path.parent.mkdir(parents=True)
            path.parent.chmod(0o755)  # another user than this one reads the data
        with replacing(path, 0o644) as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}). Choose another folder.") from error
