"""``fedcross analyse``: plots of the models of runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from fedcross.analysis.subject import Options, Subject
from fedcross.core.errors import ConfigError, StorageError

KINDS = {
    "cka": "CKA of layers, before and after the exchange and between clients",
    "tsne": "t-SNE of embeddings at chosen rounds",
    "forgetting": "accuracy per class before and after the exchange",
    "gradcam": "Grad-CAM of chosen test images",
    "landscape": "loss surfaces and sharpness of final models, and the diversity of pools",
}
"""Analysis -> short description; each is a module of this package with a function ``draw``."""
SEVERAL = ("landscape",)
"""Analyses that compare runs; the others take one run."""


def analyse(runs: Sequence[Path], kind: str, out: Path, options: Options) -> list[Path]:
    """Write one analysis of runs into `out` and return the files.

    Parameters
    ----------
    runs : sequence of Path
        Folders of runs. Every kind but ``landscape`` takes one, with snapshots.
    kind : str
        A key of :data:`KINDS`.
    out : Path
        Folder for the files.
    options : Options
        What to show.

    Raises
    ------
    ConfigError
        If there are several runs and `kind` takes one.
    DataError
        If the run did not keep these models, or the data set is missing.
    StorageError
        If `out` cannot be written.
    """
    if len(runs) > 1 and kind not in SEVERAL:
        raise ConfigError(f"{kind} shows one run. Give one folder; {', '.join(SEVERAL)} compares several.")
    subjects = [Subject(run, options.data) for run in runs]
    module = importlib.import_module(f"fedcross.analysis.{kind}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        written: list[Path] = module.draw(subjects if kind in SEVERAL else subjects[0], options, out)
    except OSError as error:
        raise StorageError(f"{out}: cannot be written ({error}). Choose another folder with --out.") from error
    return written
