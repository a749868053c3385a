"""Why a run or a deployment does not work: one table of causes, and how each is recognised in what fedcross says.

``fedcross`` names the cause of an error that ends a command, ``fedcross doctor`` those of the faults that it finds, and
``docs/reference/faults.md`` is made of this table.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fedcross.core.paths import page

#: What says more of every cause.
PAGE = page("reference/faults.md")
RUN, SERVER, DEVICE, DOCTOR, DEPLOY = "run", "server", "device", "doctor", "deploy"


@dataclass(frozen=True)
class Cause:
    """One cause.

    Attributes
    ----------
    name : str
        Short and lasting, for programs.
    what : str
        What is wrong, in one sentence.
    words : str
        Regular expression for the message by which it is recognised.
    source : str
        The file that says the message; "" for the system, TLS or Flower.
    exit_code : int
        Of the command that says it; 0 if it is said in a device's log and the run goes on without the device.
    who : str
        Who says it: a run, its server, a device, ``fedcross doctor`` or ``fedcross deploy``.
    """

    name: str
    what: str
    words: str
    source: str
    exit_code: int
    who: str


#: The first cause that matches counts, so special ones stand before general ones.
CAUSES = (
    Cause(
        "disk_full",
        "The disk is full, or too full for a run.",
        r"No space left on device|GiB are needed\. Free space|more files fit there \(inodes\)",
        "server/commands/doctor.py",
        2,
        RUN,
    ),
    Cause("quota_exceeded", "The user's share of the disk is used up.", "Disk quota exceeded", "", 2, RUN),
    Cause("read_only", "The file system is mounted read-only.", "Read-only file system", "", 2, RUN),
    Cause(
        "checkpoint_unwritable",
        "A checkpoint cannot be written.",
        "the checkpoint cannot be written",
        "server/checkpoint.py",
        2,
        RUN,
    ),
    Cause(
        "folder_in_use",
        "Another run writes into the folder.",
        "another process runs in this folder",
        "server/run_folder.py",
        2,
        RUN,
    ),
    Cause("folder_used", "The folder holds a run already.", "it already holds a run", "server/run_folder.py", 2, RUN),
    Cause(
        "no_checkpoint",
        "There is nothing that can be continued.",
        "no readable checkpoint|this folder holds no run",
        "server/checkpoint.py",
        2,
        RUN,
    ),
    Cause(
        "other_settings",
        "The run in the folder has other settings, or other data.",
        "Resume needs the same",
        "server/identity.py",
        2,
        RUN,
    ),
    Cause(
        "audit_changed",
        "The audit trail was changed.",
        "is not the one that the checkpoint of round",
        "server/audit.py",
        2,
        RUN,
    ),
    Cause(
        "folder_unwritable",
        "A folder cannot be written.",
        "output=.*cannot be written|this user. Choose another folder or change its owner",
        "server/run_folder.py",
        2,
        RUN,
    ),
    Cause(
        "no_clients",
        "No client is connected.",
        r"\b0 clients are connected after",
        "strategies/round/nodes.py",
        1,
        SERVER,
    ),
    Cause(
        "too_few_clients",
        "Fewer clients are connected than a round needs.",
        "clients are connected after",
        "strategies/round/nodes.py",
        1,
        SERVER,
    ),
    Cause(
        "too_few_simulated",
        "Flower simulates fewer clients than a round needs.",
        "clients are simulated, ",
        "strategies/round/nodes.py",
        1,
        SERVER,
    ),
    Cause(
        "clients_refuse",
        "All clients refuse the run's configuration.",
        r"clients of round \d+ refuse: ",
        "strategies/round/client_faults.py",
        2,
        SERVER,
    ),
    Cause(
        "wrong_shapes",
        "The devices send models of another shape: they have another model or another configuration.",
        r"not one accepted reply \((wrong_shape|missing_array|extra_array|wrong_dtype|too_large)",
        "",
        1,
        SERVER,
    ),
    Cause(
        "nothing_trained",
        "Not one reply of a client was accepted.",
        "not one accepted reply",
        "server/accounting.py",
        1,
        SERVER,
    ),
    Cause(
        "out_of_memory",
        "Memory ran out.",
        "out of memory|too little memory|MemoryError|can't allocate memory|Cannot allocate memory"
        "|failed to map segment from shared object(?!: Operation)",
        "engines/memory.py",
        1,
        SERVER,
    ),
    Cause(
        "serverapp_lost",
        "The SuperLink heard no more of a run's server process: it was killed, or the SuperLink was too busy.",
        "took the ServerApp's process for lost",
        "engines/memory.py",
        1,
        SERVER,
    ),
    Cause(
        "trainer_stuck",
        "A device's trainer does not answer.",
        "The trainer did not answer within",
        "client/resident/connect.py",
        0,
        DEVICE,
    ),
    Cause("gpu_failed", "The GPU failed while it worked.", "The GPU failed ", "client/device.py", 1, DEVICE),
    Cause(
        "no_gpu",
        "There is no GPU that torch can use.",
        "torch cannot use one|usable GPUs on this machine",
        "client/device.py",
        2,
        RUN,
    ),
    Cause("no_partition", "A device does not know its partition.", "has no partition-id", "client/app.py", 0, DEVICE),
    Cause(
        "certificate_expired",
        "A certificate has expired.",
        "expired on |certificate has expired",
        "core/trust/certificates.py",
        2,
        DEPLOY,
    ),
    Cause(
        "certificate_early",
        "A certificate is not valid yet, so a clock is wrong.",
        "is this clock right|certificate is not yet valid",
        "core/trust/certificates.py",
        2,
        DEPLOY,
    ),
    Cause(
        "wrong_server_name",
        "The server's certificate is for another name.",
        "Hostname mismatch|IP address mismatch",
        "",
        1,
        DOCTOR,
    ),
    Cause(
        "wrong_authority",
        "A certificate is of another authority.",
        "not signed by |of another authority than |unable to get local issuer certificate|self-signed certificate",
        "core/trust/certificates.py",
        2,
        DEPLOY,
    ),
    Cause(
        "certificate_refused",
        "The server's certificate is refused.",
        "its certificate is refused",
        "server/commands/device_checks.py",
        1,
        DOCTOR,
    ),
    Cause(
        "open_key",
        "Others can read a private key.",
        "so others on this machine can use it",
        "core/private_files.py",
        2,
        DEPLOY,
    ),
    Cause("unknown_key", "The SuperLink knows no such key.", "no registered node has it", "deploy/nodes.py", 1, DEPLOY),
    Cause(
        "key_bound",
        "A key or partition is registered otherwise.",
        "it is registered for partition|it belongs to key|was registered without a partition",
        "deploy/nodes.py",
        1,
        DEPLOY,
    ),
    Cause(
        "clock_off",
        "A device's clock differs too much from the server's.",
        "Set it, and turn on its synchronisation",
        "server/commands/device_checks.py",
        1,
        DOCTOR,
    ),
    Cause(
        "foreign_server",
        "Something else than this federation's gateway or SuperLink answers.",
        "Is this the address of the gateway|is no SuperLink of this federation",
        "server/commands/device_checks.py",
        1,
        DOCTOR,
    ),
    Cause(
        "no_connection",
        "The server cannot be reached.",
        "Is the server up, the name right, the firewall open",
        "server/commands/doctor.py",
        1,
        DOCTOR,
    ),
    Cause(
        "superlink_away",
        "The SuperLink does not answer.",
        ": no answer within |its SuperLink does not answer",
        "engines/remote.py",
        1,
        RUN,
    ),
    Cause(
        "control_port_closed",
        "The SuperLink's control port does not answer.",
        ": the connection failed ",
        "engines/remote.py",
        1,
        DEPLOY,
    ),
    Cause(
        "superlink_lost",
        "The SuperLink, or the SuperExec, went away during the run.",
        "the SuperLink cannot be asked any more|SuperLink ended in the middle of the run"
        "|SuperExec ended in the middle of the run",
        "engines/runs.py",
        1,
        RUN,
    ),
    Cause(
        "app_refused",
        "Flower did not take the app or the run.",
        "flwr run failed with exit code",
        "engines/flower.py",
        1,
        RUN,
    ),
    Cause(
        "port_taken",
        "A port is taken.",
        "[Aa]ddress already in use|Port in server address .* already in use"
        "|Stop the program that uses it, or choose another ",
        "core/ports.py",
        1,
        DEPLOY,
    ),
    Cause(
        "no_data",
        "A data folder is missing or empty.",
        "no such data folder|this data folder is empty",
        "server/commands/doctor.py",
        1,
        DOCTOR,
    ),
    Cause(
        "data_missing",
        "The data of a run are not where it looks for them.",
        r"no such file\. Set task\.root|no such folder\. (Give the folder that save_to_disk|Put pictures)"
        r"|: missing \S*/|folder of this run's data is missing|no such file\. Give the JSON of the clients",
        "tasks/reading/tables.py",
        2,
        RUN,
    ),
    Cause(
        "wrong_version",
        "A library has another version than is needed.",
        "is needed. pip install|this version of Flower is not supported",
        "server/commands/doctor.py",
        1,
        DOCTOR,
    ),
    Cause("missing_program", "Flower's programs are missing.", "nor on PATH. Install", "engines/flower.py", 1, RUN),
)
_PATTERNS = tuple((re.compile(cause.words), cause) for cause in CAUSES)


def cause_of(text: str, given: Iterable[str] = ()) -> Cause | None:
    """Return the cause that the message `text` tells of; None if it is not in the table.

    Parameters
    ----------
    text : str
        The message.
    given : iterable of str
        What the user gave, such as the words of the command line. A folder in it, or in the working folder's path, may
        be called as a cause is recognised ("out of memory"): where `text` repeats it, it tells of nothing.
    """
    for name in sorted(_misleading(given), key=len, reverse=True):
        text = re.sub(r"(^|[/='\"])" + re.escape(name), r"\1...", text)
    return _recognised(text)


def _recognised(text: str) -> Cause | None:
    return next((cause for pattern, cause in _PATTERNS if pattern.search(text)), None)


def _misleading(given: Iterable[str]) -> set[str]:
    """Return the parts of paths among what the user gave that look like a cause."""
    environment = (value for name, value in os.environ.items() if name.startswith("FEDCROSS_"))
    with contextlib.suppress(OSError):  # the working folder was removed
        given = [*given, str(Path.cwd())]
    parts = {part.strip("'\"") for one in (*given, *environment) for part in re.split("[/=]", one)}
    return {part for part in parts if _recognised(part) is not None}
