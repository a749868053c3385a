"""``fedcross-analyse``: pictures of what the models of a run have learned."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.errors import FedcrossError, StorageError

#: Analysis -> what it shows; each is a module of this package with a function ``draw``.
KINDS = {
    "cka": "CKA of layers, before and after the exchange and between clients",
    "tsne": "t-SNE of embeddings at chosen rounds",
    "forgetting": "accuracy per class before and after the exchange",
    "gradcam": "Grad-CAM of chosen test images",
}


def parser() -> argparse.ArgumentParser:
    """Return the command line of ``fedcross-analyse``."""
    line = argparse.ArgumentParser(
        prog="fedcross-analyse",
        description="Pictures of the models that a run kept (fedcross ... snapshots.rounds=[1,10,100]).",
        epilog="kinds: " + "; ".join(f"{name}: {text}" for name, text in KINDS.items()),
    )
    line.add_argument("run", metavar="RUN", type=Path, help="folder of one run")
    line.add_argument("kind", choices=tuple(KINDS), help="what to show")
    line.add_argument("--rounds", nargs="+", type=int, default=[], metavar="N", help="rounds (default: all kept ones)")
    line.add_argument(
        "--slots", nargs="+", type=int, default=[], metavar="I", help="single models, for tsne and gradcam"
    )
    line.add_argument("--examples", type=int, default=500, metavar="N", help="test examples (default: 500)")
    line.add_argument("--images", nargs="+", type=int, default=[], metavar="I", help="test images for gradcam")
    line.add_argument("--data", type=Path, metavar="DIR", help="where the data sets lie (default: as the run said)")
    line.add_argument("--out", type=Path, metavar="FOLDER", help="where to write (default: 'analysis' in RUN)")
    return line


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
        Where to write; ``RUN/analysis`` if None.
    data : Path or None
        Where the data sets lie; as the run said if None.
    rounds, slots, images : sequence of int
        Rounds (all kept ones if empty), single models, indices of test images.
    examples : int
        Number of test examples.

    Raises
    ------
    DataError
        If the run kept no such models, or the data set is missing.
    StorageError
        If `out` cannot be written.
    """
    from analysis.subject import Options, Subject

    folder = out or run / "analysis"
    subject = Subject(run, data)
    options = Options(tuple(rounds), tuple(slots), examples, tuple(images))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written: list[Path] = importlib.import_module(f"analysis.{kind}").draw(subject, options, folder)
    except OSError as error:
        raise StorageError(f"{folder}: cannot be written ({error}). Choose another folder with --out.") from error
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``fedcross-analyse``; return the exit code (0, or 2 for wrong use and for runs without snapshots)."""
    options = vars(parser().parse_args(arguments))
    try:
        for path in analyse(**options):
            print(path)
    except FedcrossError as error:
        print(f"fedcross-analyse: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
