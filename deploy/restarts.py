"""Which programs must be started again after files that they read once were made anew."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from fedcross.core.trust.keys import SECRET
from fedcross.deploy import tokens

SUPERLINK, GATEWAY, SUPEREXEC = "the SuperLink", "the gateway", "the SuperExec"
#: A secret below the federation's folder -> who reads it at the start.
READERS = {
    "server/server.key": (SUPERLINK, GATEWAY),
    f"server/{tokens.GATEWAY}": (SUPERLINK, GATEWAY),
    f"superexec/{SECRET}": (SUPERLINK, SUPEREXEC),
    "operator/token": (SUPERLINK, SUPEREXEC),
}
#: The live page's token: each run reads it at its start.
PAGE = "page/token"


def after(root: Path, made: Collection[str]) -> list[str]:
    """Return a line for who must be started again, as `made` are new; none if everything is, as at the first call."""
    new = {str(Path(name).relative_to(root)) for name in made if Path(name).is_relative_to(root)}
    files = [name for name in READERS if name in new]
    lines = []
    if files and len(files) < len(READERS):
        programs = dict.fromkeys(program for name in files for program in READERS[name])
        if {"server/server.key", "superexec/ca.crt"} <= new:  # another authority
            programs[SUPEREXEC] = None
        lines = [line(list(programs), files)]
    if PAGE in new and len(files) < len(READERS):
        lines.append(
            f"{PAGE} is new: a run that is on takes the old one until it ends. To end that now: fedcross deploy stop "
            "RUN, then fedcross deploy resume RUN"
        )
    devices = sorted(name for name in new if name.endswith(f"/{SECRET}") and name not in READERS)
    for name in devices:
        device = Path(name).parent.name
        if f"{device}/{device}-node.key" not in new:
            lines.append(line([f"device {device}"], [name]))
    return lines


def line(programs: Sequence[str], files: Sequence[str]) -> str:
    """Return the words for `programs` that read new `files`, a certificate's key or secrets that they share."""
    new = f"{', '.join(files)} {'is' if len(files) == 1 else 'are'} new"
    shared = len(programs) > 1 and any(not name.endswith("server.key") for name in files)
    who = " and ".join(filter(None, (", ".join(programs[:-1]), programs[-1])))
    together, why = (" together", ", and who has the old one is refused") if shared else ("", "")
    ends = ""
    if SUPEREXEC in programs:
        ends = f". A run that is on ends with {SUPEREXEC}: resume it afterwards (fedcross deploy resume RUN)"
    return f"Restart {who}{together}: {new}{why}{ends}"
