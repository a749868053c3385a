"""``fedcross new-method``: writes the files of a method of one's own, which run and pass their tests."""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.paths import extra_folders, room

#: File of the user's folder -> its template in the folder ``templates``.
FILES = {"strategies/@NAME@.py": "method", "conf/method/@NAME@.yaml": "settings", "tests/test_@NAME@.py": "test"}


def write(name: str, folder: Path, *, loss: bool = False) -> list[Path]:
    """Write the files of method `name` below `folder` and return their paths; `loss`: a method of one loss.

    A ConfigError says that `name` cannot be used, a StorageError that a file exists or cannot be written.
    """
    templates, kind = Path(__file__).parent / "templates", "".join(part.capitalize() for part in name.split("_"))
    end = f"{'_loss' * loss}.txt"
    sources = {folder / path.replace("@NAME@", name): templates / f"{one}{end}" for path, one in FILES.items()}
    if loss:  # under any server rule: method=fedcross objective=NAME
        sources[folder / "conf/objective" / f"{name}.yaml"] = templates / f"settings{end}"
    check_name(name, kind, "".join(path.read_text(encoding="utf-8") for path in sources.values()))
    if there := [str(path) for path in sources if path.exists()]:
        raise StorageError(f"{', '.join(there)}: exists already. Choose another name or folder; nothing was written.")
    try:
        for path, source in sources.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            text = source.read_text(encoding="utf-8").replace("@NAME@", name).replace("@CLASS@", kind)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written ({error.strerror}). Choose another folder.") from error
    return list(sources)


def check_name(name: str, kind: str, text: str) -> None:
    """Raise a ConfigError unless `name` can be a method's name, and its class `kind` hides no word of `text`."""
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ConfigError(f"new-method {name!r}: a name has small letters, digits and single _, such as my_method.")
    homes = [room("strategies"), *map(Path, extra_folders("strategies"))]
    paths = [home / end for home in homes for end in (f"{name}.py", name)]
    paths += [home / "method" / f"{name}.yaml" for home in (room("conf"), *map(Path, extra_folders("conf")))]
    if any(path.exists() for path in paths) or re.search(rf"(?<!@)\b{kind}\b", text):
        raise ConfigError(f"new-method {name!r}: this name is taken. Choose another one.")


def main(arguments: Sequence[str]) -> int:
    """Write the files of a new method; return the exit code."""
    parser = argparse.ArgumentParser("fedcross new-method", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", help="name of the method, such as my_method")
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder for own methods; FEDCROSS_PATH then names it")
    parser.add_argument("--loss", action="store_true", help="a method of one loss of the clients; the server averages")
    asked = parser.parse_args(arguments)
    for path in write(asked.name, asked.folder, loss=asked.loss):
        print(path)
    folder = asked.folder.resolve()
    print(f"\nRun it:   FEDCROSS_PATH='{folder}' fedcross method={asked.name} task=digits")
    print(f"Test it:  python -m pytest '{folder / 'tests' / f'test_{asked.name}.py'}'")
    return 0
