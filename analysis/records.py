"""``fedcross record``: writes small records of finished runs into the repository, and the results page.

A record holds what a report needs: the configuration, ``metrics.jsonl`` and ``result.json``. For ``fedcross record
verify`` it also holds the digests of the checkpoints, the visits of a run that only they can repeat (``clock=real`` or
``replay``) and, if asked for, a few checkpoints. It holds no other models and no paths of this machine.
``docs/results.md`` is generated from all records and never edited by hand.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcross.analysis.axes import AXES
from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.core.events import say
from fedcross.core.strict_json import dumps

if TYPE_CHECKING:
    from fedcross.analysis.groups import Group

LIMIT_MB = 10.0
"""Most megabytes (1e6 bytes) that the records of one name may take."""

DIGESTS = "digests.jsonl"
"""File with the digest of the method's state after every round that was checkpointed."""

VISITS = "visits.jsonl"
"""File with the visits of an asynchronous run, in the order in which they ended."""

DIGITS = 6
"""Significant digits of the numbers in a record's ``metrics.jsonl``."""

NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")
#: Settings with paths of one machine, which do not belong in a record, and their replacements.
NEUTRAL = {"data_root": "data", "output": None, "resume": None}
NOTE = "NOTE.md"
"""File with a hand-written remark beside the records of one name; the page quotes it."""
SECTION = "section.json"
"""File with more for a name's section, all of it optional (:class:`Shown`)."""
CONTENTS = "contents.json"
"""File beside the names' folders, optional: heading -> name -> what its section shows, in the order of the page."""
OTHERS = "Others"
"""Heading of the names that ``contents.json`` leaves out."""


def record(
    folders: Sequence[Path], name: str, results: Path, limit_mb: float = LIMIT_MB, checkpoints: int = 0
) -> list[Path]:
    """Copy the records of all finished runs below `folders` into ``results/name`` and return their folders.

    A line says which runs are left out, and why. Existing records stay, except that a new record replaces one of the
    same configuration and seed (with ``clock=real`` or ``replay``, of the same visits too), unless both say that they
    are of different data; a line says so if that was another run's. A record takes `checkpoints` of its run's
    checkpoints along, spread over the run: ``fedcross record verify`` starts from them. With none, a record of the same
    run keeps those that it has; a line names those that go.

    Raises
    ------
    ConfigError
        If `name` is not a plain name, or the records would take more than `limit_mb`.
    DataError
        If there is no finished run whose files are all of one run.
    StorageError
        If `results` cannot be written.
    """
    from fedcross.analysis.agreement import digest_fault
    from fedcross.analysis.loading import load_runs

    if not NAME.fullmatch(name):
        raise ConfigError(f"--name {name!r}: small letters, digits, and _.- only. Choose another name.")
    loaded = load_runs(folders)
    faults = {run.path: fault for run in loaded.runs if (fault := digest_fault(run.path, DIGESTS))}
    notes = [*loaded.notes, *(f"left out {path}: {fault}" for path, fault in faults.items())]
    if len(faults) == len(loaded.runs):
        raise DataError(f"{name}: no run that can be recorded." + "".join(f"\n  {note}" for note in notes))
    for note in notes:
        say(note, "WARNING")
    found = [(run.path, _texts(run.path)) for run in loaded.runs if run.path not in faults]
    home = results / name
    places = _places(home, [texts for _, texts in found])
    new = {
        place: {name: text.encode() for name, text in texts.items()} | _chosen(run, checkpoints)
        for place, (run, texts) in zip(places, found, strict=True)
    }
    dropped: list[str] = []
    for folder, files in new.items():
        dropped += _carry(folder, files, checkpoints)
    kept = sum(p.stat().st_size for p in home.rglob("*") if p.is_file() and not set(p.parents) & new.keys())
    size = kept + sum(len(data) for files in new.values() for data in files.values())
    if size > limit_mb * 1e6:
        raise ConfigError(
            f"--name {name}: the records would take {size / 1e6:.1f} MB, the limit is {limit_mb:g} MB. Nothing was "
            "written. Record fewer runs, spread them over several names, or raise --limit-mb."
        )
    _tell_replaced(places, found)
    for told in dropped:
        say(told, "WARNING")
    try:
        for folder, files in new.items():
            shutil.rmtree(folder, ignore_errors=True)
            for relative, data in files.items():
                (folder / relative).parent.mkdir(parents=True, exist_ok=True)
                (folder / relative).write_bytes(data)
    except OSError as error:
        raise StorageError(f"{home}: cannot be written ({error}). Choose another folder with --results.") from error
    return sorted(new)


def _places(home: Path, found: Sequence[Mapping[str, str]]) -> list[Path]:
    """Return the folder of each record: its own name's, or one with its data in the name where other data have that.

    A record without digests of its data, of an older version, is taken for one of the same data.
    """
    taken: dict[Path, Mapping[str, Any]] = {}
    places = []
    for files in found:
        data = _data_of(files["result.json"])
        place, apart = (home / _folder_name(files, more) for more in ("", json.dumps(data, sort_keys=True)))
        with suppress(OSError):
            taken.setdefault(place, _data_of((place / "result.json").read_text(encoding="utf-8")))
        other = any(digest != taken.get(place, {}).get(part, digest) for part, digest in data.items())
        place = apart if data and (other or (apart.is_dir() and taken.get(place) != data)) else place
        taken.setdefault(place, data)
        places.append(place)
    return places


def _data_of(result: str) -> Mapping[str, Any]:
    """Return the digests of the data in the text of a ``result.json``."""
    try:
        data = json.loads(result).get("data")
    except (ValueError, AttributeError):
        return {}
    return data if isinstance(data, dict) else {}


def _tell_replaced(places: Sequence[Path], found: Sequence[tuple[Path, Mapping[str, str]]]) -> None:
    """Say which records of other runs those of `found` replace; a run that is recorded again has the same metrics."""
    taken: dict[Path, tuple[str, str]] = {}  # the record's folder -> whose it is, and its metrics
    for folder, (run, texts) in zip(places, found, strict=True):
        metrics = texts["metrics.jsonl"]
        before = folder / "metrics.jsonl"
        if folder not in taken and before.is_file():
            taken[folder] = "another run", before.read_text(encoding="utf-8", errors="replace")
        whose, told = taken.get(folder, ("", metrics))
        if told != metrics:
            say(
                f"{folder}: this record of {whose} is replaced by that of {run}: same configuration and seed.",
                "WARNING",
            )
        taken[folder] = str(run), metrics


def _texts(run: Path) -> dict[str, str]:
    """Return the files of one record: path inside the record -> text."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        config = OmegaConf.to_container(OmegaConf.load(run / ".hydra" / "config.yaml"), resolve=False)
        lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return _record(dict(config), lines, run)  # type: ignore[arg-type]
    except (OSError, ValueError, TypeError, KeyError, YAMLError, OmegaConfBaseException) as error:
        raise DataError(
            f"{run}: not a finished run with readable files ({' '.join(str(error).split())[:200]})."
        ) from error


def _record(config: dict[str, Any], lines: list[str], run: Path) -> dict[str, str]:
    from omegaconf import OmegaConf

    if (clock := config.get("clock") or {}).get("name") in ("real", "replay"):
        kept = [DIGESTS, VISITS]
        config = {**config, "clock": {**clock, "events": None if clock.get("events") is None else VISITS}}
    else:
        kept = [DIGESTS]
    return {
        ".hydra/config.yaml": OmegaConf.to_yaml(OmegaConf.create(neutral(config))),
        "metrics.jsonl": "".join(dumps(short(json.loads(line))) + "\n" for line in lines if line),
        "result.json": (run / "result.json").read_text(encoding="utf-8"),
    } | {name: (run / name).read_text(encoding="utf-8") for name in kept if (run / name).exists()}


def _chosen(run: Path, count: int) -> dict[str, bytes]:
    """Return `count` of the run's checkpoints, spread evenly, without the last round's, as files of its record."""
    files = sorted((run / "checkpoints").glob("round-*.safetensors"))[:-1]
    places = sorted({round(i * (len(files) - 1) / max(count - 1, 1)) for i in range(count)}) if files else []
    return {f"checkpoints/{files[i].name}": files[i].read_bytes() for i in places}


def _carry(folder: Path, files: dict[str, bytes], asked: int) -> list[str]:
    """Add the checkpoints that the record in `folder` has of the same run to `files`, unless others are `asked` for.

    Returns
    -------
    list of str
        A sentence on those that the record loses; none if it loses none.
    """
    try:
        same = (folder / "metrics.jsonl").read_bytes() == files["metrics.jsonl"]
    except OSError:
        return []
    had = {f"checkpoints/{path.name}": path for path in sorted((folder / "checkpoints").glob("round-*.safetensors"))}
    if same and not asked:
        files |= {name: path.read_bytes() for name, path in had.items()}
    if not (lost := [Path(name).stem for name in had if name not in files]):
        return []
    why = "others were asked for" if same else "they are of the record that is replaced"
    return [f"{folder}: its checkpoints {', '.join(lost)} are removed: {why}."]


def _folder_name(files: Mapping[str, str], more: str = "") -> str:
    """Return a name that is unique for the run: method, task, seed and a digest.

    The digest is of configuration and visits, of what the run changed on its way, and of `more`.
    """
    import hashlib

    result = json.loads(files["result.json"])
    more += json.dumps(result["changes"], sort_keys=True) if result.get("changes") else ""
    digest = hashlib.sha256((files[".hydra/config.yaml"] + files.get(VISITS, "") + more).encode()).hexdigest()[:8]
    return f"{result['method']}-{result['task']}-seed{result['seed']}-{digest}"


def neutral(config: dict[str, Any]) -> dict[str, Any]:
    """Return `config` without paths of this machine: absolute paths keep only their last part."""

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {name: walk(value) for name, value in node.items()}
        if isinstance(node, list):
            return [walk(value) for value in node]
        return Path(node).name if isinstance(node, str) and os.path.isabs(node) else node  # noqa: PTH117 - a string

    plain: dict[str, Any] = walk({**config, **{k: v for k, v in NEUTRAL.items() if k in config}})
    if isinstance(plain.get("task"), dict) and "root" in plain["task"]:
        plain["task"]["root"] = NEUTRAL["data_root"]
    return plain


def short(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return one line of metrics without empty fields, and with ``DIGITS`` significant digits."""
    filled = {name: value for name, value in line.items() if value is not None and value != {}}
    return {k: float(f"{v:.{DIGITS}g}") if isinstance(v, float) else v for k, v in filled.items()}


# ---- the page --------------------------------------------------------------------------------------------------------


def write_page(results: Path, page: Path) -> str:
    """Write the results page and its plots from all records below `results`, and return its text.

    Raises
    ------
    DataError
        If there is no record.
    StorageError
        If the page cannot be written.
    """
    names = sorted(p.name for p in results.iterdir() if p.is_dir()) if results.is_dir() else []
    if not names:
        raise DataError(f"{results}: no records. Make one with fedcross record DIR --name NAME.")
    pictures = page.parent / "images"
    try:
        pictures.mkdir(parents=True, exist_ok=True)
        contents = _contents(results / CONTENTS, names)
        ordered = [name for heading in contents.values() for name in heading]
        parts = [_section(results / name, pictures) for name in ordered]
        records = [file.parent for name in names for file in (results / name).glob("*/metrics.jsonl")]
        proven = sum((record / DIGESTS).exists() for record in records)
        text = (
            "# Results\n\nMade by `fedcross record` from the records in `results/`; do not edit. A cell with ± is mean "
            "and standard deviation over seeds. Times are those of machines that did other work too; speeds are "
            "measured on the page on performance. `fedcross record verify NAME` runs rounds of a record again: "
            f"{proven} of the {len(records)} records have digests of their models, the others are compared by their "
            "losses and accuracies.\n\n" + _list(contents) + "\n".join(parts)
        )
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{page}: cannot be written ({error}). Choose another file with --page.") from error
    return text


def _contents(file: Path, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return heading -> name -> what it shows, of the names that there are; those that the file lacks come last."""
    told: dict[str, dict[str, str]] = {}
    try:
        if file.exists():
            told = {str(heading): dict(within) for heading, within in json.loads(file.read_text("utf-8")).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: {error}. Correct the file: heading -> name -> what it shows.") from error
    known = [name for within in told.values() for name in within]
    if absent := [name for name in known if name not in names]:
        raise DataError(f"{file}: there are no records of the name {absent[0]}. Correct the file.")
    others = {name: "" for name in names if name not in known}
    return {**told, **({OTHERS: others} if others else {})}


def _list(contents: Mapping[str, Mapping[str, str]]) -> str:
    """Return the table of contents; nothing if there is only one heading."""
    if len(contents) < 2:
        return ""
    lines = []
    for heading, within in contents.items():
        lines.append(f"- {heading}")
        lines += [f"    - [{name}](#{name}){f': {text}' if text else ''}" for name, text in within.items()]
    return "## Contents\n\n" + "\n".join(lines) + "\n\n"


@dataclass(frozen=True)
class Shown:
    """What ``section.json`` asks for, such as ``{"until": 150, "targets": [0.5], "x": "virtual"}``."""

    also: list[Path] = field(default_factory=list)
    """Folders of other records that the section shows too; names below RESULTS in the file."""
    until: int | None = None
    """The last round that counts; None: all of them."""
    every: int | None = None
    """Rounds between the evaluations that count; None: all of them."""
    methods: list[str] = field(default_factory=list)
    """Names of the methods that are shown; none: all."""
    targets: list[float] = field(default_factory=list)
    """Target accuracies between 0 and 1; none: the report's own choice."""
    at: list[int] = field(default_factory=list)
    """Rounds whose accuracy is shown."""
    x: str = "rounds"
    """The axis of the curves, a key of ``AXES``."""
    names: dict[str, str] = field(default_factory=dict)
    """What a row and its curve are called in place of their label."""


def _section(folder: Path, pictures: Path) -> str:
    from fedcross.analysis import formats
    from fedcross.analysis.ablation import plot_grids
    from fedcross.analysis.curves import MOST, plot_curves
    from fedcross.analysis.groups import LENGTH, group_runs
    from fedcross.analysis.loading import load_runs
    from fedcross.analysis.summary import build

    shown = _shown(folder)
    loaded = load_runs([folder, *shown.also], until=shown.until, every=shown.every)
    runs = [run for run in loaded.runs if not shown.methods or run.settings["method.name"] in shown.methods]
    groups, notes = group_runs(runs)
    groups = _renamed(groups, shown.names, folder)
    report = build(groups, [*loaded.notes, *notes], shown.targets, shown.at)
    parts = [f"## {folder.name}\n"]
    if (folder / NOTE).exists():
        parts.append((folder / NOTE).read_text(encoding="utf-8").strip() + "\n")
    parts += [formats.markdown(table).replace("## ", "### ", 1) for table in report.tables]
    if len(groups) <= MOST or not report.grids:  # else the grids say more
        drawn = _renamed(group_runs(runs, but=LENGTH)[0], shown.names)
        plot_curves(drawn, shown.x, pictures / f"results-{folder.name}.png")
        parts.append(f"![{folder.name}: test accuracy](images/results-{folder.name}.png)\n")
    if report.grids:
        plot_grids(report.grids, pictures / f"results-{folder.name}-ablation.png")
        parts.append(f"![{folder.name}: ablation](images/results-{folder.name}-ablation.png)\n")
    parts += [f"- {note.replace(str(folder.resolve()) + os.sep, '')}\n" for note in report.notes]
    return "\n".join([*parts, _provenance([dict(run.result) for run in runs])])


def _renamed(groups: Sequence[Group], names: Mapping[str, str], folder: Path | None = None) -> list[Group]:
    """Return the groups with the names that ``section.json`` gives; with its `folder`, each has to name one."""
    if folder is not None and (unknown := set(names) - {group.label for group in groups}):
        raise DataError(f"{folder / SECTION}: 'names' has {sorted(unknown)[0]!r}, which no row is called.")
    return [replace(group, method=names.get(group.label, group.method)) for group in groups]


def _shown(folder: Path) -> Shown:
    """Return what the section of `folder` shows beside its own records, and how."""
    file = folder / SECTION
    if not file.exists():
        return Shown()
    try:
        asked = json.loads(file.read_text(encoding="utf-8"))
        if unknown := set(asked) - {one.name for one in fields(Shown)}:
            raise ValueError(
                f"{', '.join(sorted(unknown))} is unknown; {', '.join(one.name for one in fields(Shown))} are known"
            )
        shown = Shown(**{**asked, "also": [folder.parent / name for name in asked.get("also", [])]})
        for name in ("until", "every"):
            value = getattr(shown, name)
            if not (value is None or (isinstance(value, int) and value > 0)):
                raise ValueError(f"'{name}' is a number of rounds, not {value!r}")
        if not all(isinstance(target, float) and 0 < target < 1 for target in shown.targets):
            raise ValueError(f"'targets' is a list of numbers between 0 and 1, not {shown.targets!r}")
        if not all(isinstance(number, int) and number > 0 for number in shown.at):
            raise ValueError(f"'at' is a list of rounds, not {shown.at!r}")
        if not (isinstance(shown.methods, list) and all(isinstance(name, str) for name in shown.methods)):
            raise ValueError(f"'methods' is a list of names, not {shown.methods!r}")
        if not (isinstance(shown.names, dict) and all(isinstance(name, str) for name in shown.names.values())):
            raise ValueError(f"'names' is a list of label: name, not {shown.names!r}")
        if shown.x not in AXES:
            raise ValueError(f"'x' is one of {', '.join(AXES)}, not {shown.x!r}")
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{file}: {error}. Correct the file; docs/sweeps.md shows an example.") from error
    return shown


def _provenance(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a text on the origin of the runs of one name: engine, machine, versions, commit."""

    def values_of(name: str) -> str:
        values = {
            json.dumps(r[name], sort_keys=True) if isinstance(r.get(name), dict) else str(r.get(name)) for r in results
        }
        return ", ".join(sorted(values)).replace('"', "").replace("{", "").replace("}", "")

    fields = ("engine", "device", "machine", "versions", "commit")
    return (
        f"{len(results)} run{'s' if len(results) > 1 else ''}. "
        + "; ".join(f"{name}: {values_of(name)}" for name in fields)
        + ".\n"
    )
