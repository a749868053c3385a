"""``fedcross deploy``: keys, devices and programs of a federation (docs/deploy.md)."""

from __future__ import annotations

import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.paths import page
from fedcross.deploy import bundle, control, keys, runs
from fedcross.deploy import sample as samples
from fedcross.deploy import start as programs
from fedcross.engines import runs as flower


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code is 0, 1 if the SuperLink refuses, 2 for wrong use or unusable files."""
    os.umask(0o077)
    asked = _parser().parse_args(arguments)
    asked.command(asked)
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser("fedcross deploy", description=f"Keys, devices and programs (see {page('deploy.md')}).")
    parts = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(command: Callable[[Namespace], None], server: bool = True) -> Callable[..., Any]:
        name, text = command.__name__.replace("_", "-"), (command.__doc__ or "").rstrip(".")
        part: ArgumentParser = parts.add_parser(name, help=text, description=text)
        part.set_defaults(command=command)
        for option in ("superlink", "authority") if server else ():
            variable = f"FEDCROSS_{option.upper()}"
            part.add_argument(f"--{option}", default=os.environ.get(variable), help=f"or ${variable}")
        return part.add_argument

    run = "Flower's id of the run, its folder or the folder's name, or last for the newest"
    for option in (
        make := add(init, server=False),
        add(renew, server=False),
    ):
        option("folder", type=Path)
        option("--names", default="", help="further names of the gateway, separated by commas")
    make("--device", action="append", default=[], metavar="NAME", help="a device of this machine")
    option = add(add_device)
    option("name")
    option("--partition", type=int, required=True, help="number of the device, from 0, unique")
    option("--address", required=True, metavar="HOST:PORT", help="of the gateway, as the device reaches it")
    option("--width", type=float, help="share of a model's channels that this device can train, such as 0.4")
    option("--output", type=Path, help="file for the bundle (default: standard output)")
    option = add(register)
    option("keys", nargs="+", type=Path, metavar="NAME-node.pub")
    option("--keep-going", action="store_true", help="a refused key is named and leaves the others alone")
    option = add(revoke)
    option("name", help="partition-N, fingerprint or id as status shows them, or NAME-node.pub")
    add(status)
    option = add(start)
    option("program", choices=["superlink", "superexec", "gateway", "device"])
    option("--keys", type=Path, required=True, help="folder server of init, or keys of a device's bundle")
    option("--listen", metavar="HOST:PORT", help="superlink: 127.0.0.1:8000, gateway: 0.0.0.0:8443")
    option("--database", type=Path, default=Path("superlink.db"), help="superlink")
    option("--health", default="127.0.0.1:9100", metavar="HOST:PORT", help="superexec")
    option("--page", default="127.0.0.1:8080", metavar="HOST:PORT", help="gateway: page of the runs")
    option("--page-listen", default="127.0.0.1:8444", metavar="HOST:PORT", help="gateway: its readers")
    option("--partitions", type=int, metavar="N", help="device: how many there are, for Flower apps")
    option("--port", type=int, default=9094, help="device: port of its own processes")
    option("--width", type=float, help="device: share of a model's channels that it can train")
    add(stop)("run", help=run)
    option = add(resume)
    option("run", help=run)
    option("settings", nargs="*", metavar="NAME=VALUE", help="further settings, such as rounds=200")
    option("--detach", action="store_true", help="do not wait for the end of the run")
    option = add(logs)
    option("run", help=run)
    option("--follow", action="store_true", help="until the run has ended; fails unless it completes")
    option = add(sample, server=False)
    option("folder", type=Path)
    option("devices", nargs="+", metavar="NAME")
    return parser


# ---- the commands; each gets the parsed arguments ----------------------------------------------------------------


def _connected(asked: Namespace) -> Any:
    return control.connect(asked.superlink, asked.authority)


def init(asked: Namespace) -> None:
    """Make missing keys and certificates, renew one that expires within 14 days."""
    made = keys.init(asked.folder, asked.device, [name for name in asked.names.split(",") if name])
    print("\n".join([*map(str, made), f"{len(made)} files made; the others were there"]))


def renew(asked: Namespace) -> None:
    """Make a new server certificate."""
    path = keys.renew(asked.folder, [name for name in asked.names.split(",") if name]).public
    print(f"{path}: valid for {keys.time_left(path).days} days. Restart the SuperLink and the gateway.")


def add_device(asked: Namespace) -> None:
    """Register a new device and write its bundle, a tar.gz file."""
    with tempfile.TemporaryDirectory(prefix="fedcross-") as work:
        public = bundle.make(Path(work), Path(asked.authority), asked.name, asked.address, asked.partition, asked.width)
        with _connected(asked) as client:
            control.register(client, *control.read_public_key(public))
        with asked.output.open("wb") if asked.output else nullcontext(sys.stdout.buffer) as file:
            bundle.write_tar(Path(work), file)
    print(f"{asked.name} is registered for partition {asked.partition}. Unpack the bundle there.", file=sys.stderr)


def register(asked: Namespace) -> None:
    """Register public keys for the partitions that they name."""
    with _connected(asked) as client:
        for path in asked.keys:
            key, partition = control.read_public_key(path)
            try:
                new = control.register(client, key, partition)
                print(f"{path.name}: {'registered for' if new else 'has'} partition {partition}", flush=True)
            except FederationError as error:
                if not asked.keep_going:
                    raise
                print(f"{path.name}: {error}", file=sys.stderr)


def revoke(asked: Namespace) -> None:
    """Shut a device out for good."""
    with _connected(asked) as client:
        node = control.revoke(client, asked.name)
    print(f"key {node.fingerprint} (partition {node.partition}) is revoked for good")


def status(asked: Namespace) -> None:
    """Devices, runs and certificates."""
    with _connected(asked) as client:
        print("\n".join(runs.summary(asked.superlink, control.listing(client), flower.listing(client))))
    authority = Path(asked.authority)
    for path in (authority, authority.with_name("server.crt")):
        if path.exists() and (said := keys.expires_soon(path)):
            print(f"WARNING: {said}")


def start(asked: Namespace) -> None:
    """Become a program of the federation."""
    if asked.program != "superlink" and not asked.superlink:
        raise ConfigError(f"{asked.program}: which SuperLink? Give --superlink HOST:PORT.")
    if asked.program == "superlink":
        command = programs.superlink(asked.keys, asked.database, asked.listen or "127.0.0.1:8000")
    elif asked.program == "superexec":
        command = programs.superexec(asked.keys, asked.superlink, asked.health)
    elif asked.program == "gateway":
        listen = asked.listen or "0.0.0.0:8443"
        command = programs.gateway(asked.keys, asked.superlink, listen, asked.page, asked.page_listen)
    else:
        command = programs.device(asked.keys, asked.superlink, asked.partitions, asked.port, asked.width)
    programs.replace_process(command)


def stop(asked: Namespace) -> None:
    """Stop a run; its checkpoints stay."""
    with _connected(asked) as client:
        run = runs.chosen(flower.listing(client), asked.run)
        if run.over:
            raise FederationError(f"run {run.run_id}: it is over already ({run.status}).")
        flower.stop(client, run.run_id)
    print(f"run {run.run_id} is stopped. To go on: fedcross deploy resume {run.run_id}")


def resume(asked: Namespace) -> None:
    """Go on with a run that was stopped or failed."""
    with _connected(asked) as client:
        known = flower.listing(client)
    overrides = runs.continued(run := runs.chosen(known, asked.run), known, asked.settings)
    new = runs.resume(asked.superlink, asked.authority, overrides, not asked.detach)
    print(f"run {run.run_id} {'goes on' if asked.detach else 'went on'} as run {new}")


def logs(asked: Namespace) -> None:
    """Print the log of a run's server."""
    with _connected(asked) as client:
        run = runs.chosen(flower.listing(client), asked.run)
        if not (asked.follow or run.over):
            print(flower.so_far(client, run.run_id), end="")
            return
        ended = flower.follow(client, run.run_id, print)
        if asked.follow and ended.status != "finished:completed":
            raise FederationError(f"run {ended.run_id} is {ended.status}. {ended.details}".rstrip())


def sample(asked: Namespace) -> None:
    """Write sample data: digits, divided unevenly over the devices."""
    print("\n".join(map(str, samples.write(asked.folder, asked.devices))) or "there is data already")
