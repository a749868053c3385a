"""``fedcross analyse``: plots of the models that a run kept."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import StorageError

#: Analysis -> short description; each is a module of this package with a function ``draw``.
KINDS = {
    "cka": "CKA of layers, before and after the exchange and between clients",
    "tsne": "t-SNE of embeddings at chosen rounds",
    "forgetting": "accuracy per class before and after the exchange",
    "gradcam": "Grad-CAM of chosen test images",
}


def analyse(
    run: Path,
    kind: str,
    out: Path | None = None,
    data: Path | None = None,
    rounds: Sequence[int] = (),
    slots: Sequence[int] = (),
    examples: int = 500,
    images: Sequence[int] = (),
) -> list[Path]:
    """Write one analysis of a run and return the files.

    Parameters
    ----------
    run : Path
        Folder of the run; it must hold snapshots.
    kind : str
        A key of ``KINDS``.
    out : Path or None
        Folder for the files; ``RUN/analysis`` if None.
    data : Path or None
        Folder of the data sets; that of the run if None.
    rounds, slots, images : sequence of int
        Rounds (all kept rounds if empty), slots of single models, indices of test images.
    examples : int
        Number of test examples.

    Raises
    ------
    DataError
        If the run did not keep these models, or the data set is missing.
    StorageError
        If `out` cannot be written.
    """
    from fedcross.analysis.subject import Options, Subject

    folder = out or run / "analysis"
    subject = Subject(run, data)
    options = Options(tuple(rounds), tuple(slots), examples, tuple(images))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = importlib.import_module(f"fedcross.analysis.{kind}").draw(subject, options, folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error}). Choose another folder with --out.") from error
    return written
