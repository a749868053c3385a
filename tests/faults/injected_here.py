"""Faults of one machine: a run's folder and disk, its clients, keys, doctor. Cause -> what injects it."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

from fedcross.core.trust.keys import KeyPair
from fedcross.core.trust.signing import make_authority, make_client, make_server
from fedcross.deploy.federation import prepare
from tests.support.disk import small_disk
from tests.support.injection import ROOT, SMALL, Bench, Told
from tests.support.network import lines

Injection = Callable[[Bench], Told]
#: A method whose clients refuse to work: put into a folder that FEDCROSS_PATH names.
REFUSING = '''"""FedAvg whose clients refuse."""
from fedcross.core.errors import ConfigError
from fedcross.core.settings import Settings
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.parts.objective import Objective


class RefusingParams(Settings):
    """None."""


class RefusingObjective(Objective[RefusingParams]):
    """Refuses."""

    def prepare(self, visit):
        """Refuse."""
        raise ConfigError("this device has no such sensor. Leave the method out.")


class Refusing(FedAvg):
    """FedAvg."""

    Objective = RefusingObjective
'''


def disk_full(bench: Bench) -> Told:
    """Fill the disk of a run that goes on."""
    place = bench.stack.enter_context(small_disk(bench.folder / "disk", "8m"))

    def fill() -> None:
        with (place / "ballast").open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError:
                pass

    return bench.broken(place / "run", fill)


def read_only(bench: Bench) -> Told:
    """Start a run on a disk that is mounted read-only."""
    place = bench.stack.enter_context(small_disk(bench.folder / "disk", "1m"))
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True)
    return bench.ends(*SMALL, "rounds=1", f"output={place / 'run'}")


def checkpoint_unwritable(bench: Bench) -> Told:
    """Put a file where the folder of checkpoints was."""
    output = bench.folder / "run"

    def replace() -> None:
        for attempt in itertools.count():
            (output / "checkpoints").rename(bench.folder / f"away-{attempt}")
            with contextlib.suppress(FileExistsError):  # the run, which goes on, was faster with a new folder
                (output / "checkpoints").touch(exist_ok=False)
                return

    return bench.broken(output, replace)


def folder_in_use(bench: Bench) -> Told:
    """Resume a run that goes on."""
    output, told = bench.folder / "run", []

    def resume() -> None:
        told.append(bench.ends(f"resume={output}"))
        os.kill(process.process.pid, 2)

    process = bench.fedcross(*SMALL, "rounds=100000", f"output={output}")
    while len(lines(output)) < 2 and process.process.poll() is None:
        time.sleep(0.1)
    resume()
    return told[0]


def stopped(bench: Bench, *more: str) -> Path:
    """Return the folder of a run that was stopped after its second round."""
    bench.done(*SMALL, "rounds=4", "stop_at=2", f"output={bench.folder / 'run'}", *more)
    return bench.folder / "run"


def folder_used(bench: Bench) -> Told:
    """Start another run in the folder of one."""
    return bench.ends(*SMALL, "rounds=1", f"output={stopped(bench)}")


def no_checkpoint(bench: Bench) -> Told:
    """Resume a folder without a run."""
    (bench.folder / "empty").mkdir()
    return bench.ends(f"resume={bench.folder / 'empty'}")


def other_settings(bench: Bench) -> Told:
    """Resume with another learning rate."""
    return bench.ends(f"resume={stopped(bench)}", "train.lr=0.5")


def audit_changed(bench: Bench) -> Told:
    """Change the last line of an audit trail, and resume."""
    run = stopped(bench, "log.audit=true")
    trail = run / "audit.jsonl"
    before, middle, last = trail.read_text().rpartition('"accepted"')
    trail.write_text(f'{before}"lost"{last}')
    assert middle
    return bench.ends(f"resume={run}", "stop_at=null")


def folder_unwritable(bench: Bench) -> Told:
    """Name a folder below a file."""
    (bench.folder / "file").touch()
    return bench.ends(*SMALL, "rounds=1", f"output={bench.folder / 'file' / 'run'}")


def nothing_trained(bench: Bench) -> Told:
    """Let every client send what is not finite."""
    attack = ("attack=not_finite", "attack.clients=4", "rounds=1")
    return bench.ends(*SMALL, *attack, f"output={bench.folder / 'run'}")


def refusing(own: Path) -> str:
    """Write the method that clients refuse below `own`, and return the path for FEDCROSS_PATH."""
    for file, text in (("strategies/refusing.py", REFUSING), ("conf/method/refusing.yaml", "name: refusing\n")):
        (own / file).parent.mkdir(parents=True)
        (own / file).write_text(text)
    return str(own)


def clients_refuse(bench: Bench) -> Told:
    """Give the clients a method that they refuse."""
    own = refusing(bench.folder / "own")
    more = ("method=refusing", "rounds=3", f"output={bench.folder / 'run'}")
    return bench.ends(*SMALL, *more, FEDCROSS_PATH=own)


def no_gpu(bench: Bench) -> Told:
    """Ask for a GPU that is not there."""
    device = [one for one in SMALL if not one.startswith("device=")]
    return bench.ends(*device, "device=cuda", "rounds=1", f"output={bench.folder / 'run'}", CUDA_VISIBLE_DEVICES="")


def out_of_memory(bench: Bench) -> Told:
    """Give a run less memory than its model needs."""
    model = ("model=mlp", "model.hidden=[30000,30000]", "rounds=1", f"output={bench.folder / 'run'}")
    process = bench.start(["prlimit", "--data=3000000000", sys.executable, "-m", "fedcross", *SMALL, *model])
    return process.told(process.started)


def missing_program(bench: Bench) -> Told:
    """Hide Flower's programs: another folder's Python, and a PATH without them."""
    python = bench.folder / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    libraries = os.pathsep.join([str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))])
    run = [*SMALL, "engine=superlink", "rounds=1", f"output={bench.folder / 'run'}"]
    run = [one for one in run if not one.startswith("engine.workers")]
    command = [str(python), "-m", "fedcross", *run]
    process = bench.start(command, PYTHONPATH=libraries, PATH="/usr/bin:/bin")
    return process.told(process.started)


# ---- keys and certificates ------------------------------------------------------------------------------------------


def federation(bench: Bench) -> Path:
    """Return the folder of a federation's keys."""
    prepare(bench.folder / "keys", ["porch"])
    return bench.folder / "keys"


def superlink(bench: Bench, keys: Path) -> Told:
    """Return what a SuperLink says that starts with these keys."""
    where = ("--secret", str(keys / "superexec"), "--database", str(bench.folder / "superlink.db"))
    return bench.ends("deploy", "superlink", str(keys / "server"), *where)


def certificate_expired(bench: Bench) -> Told:
    """Start a SuperLink whose certificate ran out two days ago."""
    keys = federation(bench)
    authority = KeyPair(keys / "authority" / "ca.crt", keys / "authority" / "ca.key")
    make_server(authority, keys / "server", ["superlink"], days=1, now=datetime.now(UTC) - timedelta(days=3))
    return superlink(bench, keys)


def certificate_early(bench: Bench) -> Told:
    """Start a SuperLink whose certificate begins in three days."""
    keys = federation(bench)
    authority = KeyPair(keys / "authority" / "ca.crt", keys / "authority" / "ca.key")
    make_server(authority, keys / "server", ["superlink"], now=datetime.now(UTC) + timedelta(days=3))
    return superlink(bench, keys)


def wrong_authority(bench: Bench) -> Told:
    """Start a SuperLink with a certificate of another federation's authority."""
    keys = federation(bench)
    make_server(make_authority(bench.folder / "other"), keys / "server", ["superlink"])
    return superlink(bench, keys)


def open_key(bench: Bench) -> Told:
    """Start a SuperLink whose key everybody can read."""
    keys = federation(bench)
    (keys / "server" / "server.key").chmod(0o644)
    return superlink(bench, keys)


# ---- doctor ---------------------------------------------------------------------------------------------------------


def doctor(bench: Bench, *arguments: str, **variables: str) -> Told:
    """Return what doctor says of this machine."""
    return bench.ends("doctor", "--output", str(bench.folder), *arguments, **variables)


def at_server(
    bench: Bench, status: int = 401, ahead: int = 0, host: str = "localhost", *, client: bool = False
) -> Told:
    """Return what doctor says on a device whose server answers so; `client`: with a client's certificate."""
    keys = federation(bench)
    pair = KeyPair(keys / "server" / "server.crt", keys / "server" / "server.key")
    if client:
        authority = KeyPair(keys / "authority" / "ca.crt", keys / "authority" / "ca.key")
        pair = make_client(authority, bench.folder / "client", "localhost")
    port = bench.answers(pair, status, ahead, "127.0.0.1" if host == "localhost" else host)
    return doctor(bench, "--device", str(keys / "porch"), "--superlink", f"{host}:{port}")


def wrong_server_name(bench: Bench) -> Told:
    """Reach the server under an address that its certificate does not have."""
    return at_server(bench, host="127.0.0.2")


def certificate_refused(bench: Bench) -> Told:
    """Let the server show a certificate that is for clients."""
    return at_server(bench, client=True)


def foreign_server(bench: Bench) -> Told:
    """Let something else than the gateway answer, with the right certificate."""
    return at_server(bench, 404)


def clock_off(bench: Bench) -> Told:
    """Set the server's clock an hour ahead."""
    return at_server(bench, 401, 3600)


def no_connection(bench: Bench) -> Told:
    """Close the server's port."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    return doctor(bench, "--device", str(federation(bench) / "porch"), "--superlink", f"localhost:{port}")


def port_taken(bench: Bench) -> Told:
    """Let another program listen on a port that must be free."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        return doctor(bench, "--listen", str(other.getsockname()[1]))


def no_data(bench: Bench) -> Told:
    """Name a data folder that is not there."""
    return doctor(bench, "--data", str(bench.folder / "none"))


def wrong_version(bench: Bench) -> Told:
    """Let numpy be version 1.0, as far as anybody can tell."""
    fake = bench.folder / "fake" / "numpy-1.0.dist-info"
    fake.mkdir(parents=True)
    (fake / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0\n")
    return doctor(bench, PYTHONPATH=os.pathsep.join([str(ROOT), str(fake.parent)]))


# ---- a SuperLink that is not there ----------------------------------------------------------------------------------


def _closed(bench: Bench) -> tuple[str, str]:
    keys = federation(bench)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return f"127.0.0.1:{closed.getsockname()[1]}", str(keys / "public" / "ca.crt")


def superlink_away(bench: Bench) -> Told:
    """Submit a run to a SuperLink that does not listen."""
    address, authority = _closed(bench)
    engine = ("engine=remote", f"engine.address={address}", f"engine.authority={authority}", "engine.wait_s=2")
    return bench.ends("task=digits", "logger=none", *engine, "rounds=1", f"output={bench.folder / 'run'}")


def control_port_closed(bench: Bench) -> Told:
    """List the devices of a SuperLink that says it is healthy and hangs up when it is asked."""
    keys = federation(bench)
    port = bench.answers(KeyPair(keys / "server" / "server.crt", keys / "server" / "server.key"), 0)
    authority = str(keys / "public" / "ca.crt")
    return bench.ends("deploy", "nodes", "--superlink", f"localhost:{port}", "--authority", authority)


HERE: dict[str, Injection] = {
    one.__name__: one
    for one in (
        *(disk_full, read_only, checkpoint_unwritable, folder_in_use, folder_used, no_checkpoint, other_settings),
        *(audit_changed, folder_unwritable, nothing_trained, clients_refuse, no_gpu, out_of_memory, missing_program),
        *(certificate_expired, certificate_early, wrong_authority, open_key, wrong_server_name, certificate_refused),
        *(foreign_server, clock_off, no_connection, port_taken, no_data, wrong_version),
        *(superlink_away, control_port_closed),
    )
}
