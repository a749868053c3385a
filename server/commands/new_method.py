"""``fedcross new-method``: writes the three files of a method of one's own, which run and pass their tests."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.paths import room
from fedcross.core.plugins import extra_folders
from fedcross.server.commands.method_template import TAKEN, files

NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


def write(name: str, folder: Path) -> list[Path]:
    """Write the files of method `name` below `folder` and return their paths.

    Raises
    ------
    ConfigError
        If `name` cannot be a method's name, or is taken.
    StorageError
        If one of the files exists or cannot be written; then none is written.
    """
    check_name(name)
    texts = {folder / path: text for path, text in files(name).items()}
    if there := [str(path) for path in texts if path.exists()]:
        raise StorageError(f"{', '.join(there)}: exists already. Choose another name or folder; nothing was written.")
    made: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                made.append(path)
                file.write(text)
    except BaseException as error:
        for one in made:
            one.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise StorageError(f"{path}: cannot be written ({error.strerror}). Choose another folder.") from error
        raise
    return made


def check_name(name: str) -> None:
    """Raise a ConfigError unless `name` can be the name of a new method."""
    if not NAME.fullmatch(name) or keyword.iskeyword(name):
        raise ConfigError(f"new-method {name!r}: a name has small letters, digits and single _, such as my_method.")
    homes = [room("strategies"), *map(Path, extra_folders("strategies"))]
    configs = [room("conf"), *map(Path, extra_folders("conf"))]
    paths = [home / end for home in homes for end in (f"{name}.py", name)]
    paths += [config / "method" / f"{name}.yaml" for config in configs]
    taken = next((path for path in paths if path.exists()), None)
    if taken is not None or name.replace("_", "") in TAKEN:
        where = f"{taken} has it" if taken is not None else "fedcross uses it"
        raise ConfigError(f"new-method {name!r}: this name is taken, {where}. Choose another one.")


def main(arguments: Sequence[str]) -> int:
    """Write the files of a new method; return the exit code."""
    parser = argparse.ArgumentParser("fedcross new-method", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="name of the method, such as my_method")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for own methods; FEDCROSS_PATH then names it")
    asked = parser.parse_args(arguments)
    for path in write(asked.name, asked.folder):
        print(path)
    folder = asked.folder.resolve()
    print(f"\nRun it:   FEDCROSS_PATH='{folder}' fedcross method={asked.name} task=digits")
    print(f"Test it:  python -m pytest '{folder / 'tests' / f'test_{asked.name}.py'}'")
    return 0
