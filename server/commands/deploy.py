"""``fedcross deploy``: keys, devices and programs of a federation (docs/deploy.md).

::

    fedcross deploy init keys --device client-1 --names fl.example.org     # keys and certificates
    fedcross deploy add-device porch --partition 3 --address fl.example.org:8443 > porch.tar.gz
    fedcross deploy revoke partition-3
    fedcross deploy status
    fedcross deploy start superlink --keys keys/server --database state/superlink.db
    fedcross deploy resume last rounds=200
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.paths import page

#: Environment variables with the SuperLink's address and the authority's certificate, for commands at the server.
SUPERLINK, AUTHORITY = "FEDCROSS_SUPERLINK", "FEDCROSS_AUTHORITY"
RUN = "Flower's id of the run, its folder or the folder's name, or last for the newest"


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code is 0, 1 if the SuperLink refuses, 2 for wrong use or unusable files."""
    os.umask(0o077)
    asked = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], None] = asked.command
    command(asked)
    return 0


def _init(asked: argparse.Namespace) -> None:
    from fedcross.deploy.keys import init

    made = init(asked.folder, asked.device, [name for name in asked.names.split(",") if name])
    print("\n".join([*map(str, made), f"{len(made)} files made; the others were there"]))


def _renew(asked: argparse.Namespace) -> None:
    from fedcross.deploy.keys import renew, time_left

    path = renew(asked.folder, [name for name in asked.names.split(",") if name]).public
    print(f"{path}: valid for {time_left(path).days} days. Restart the SuperLink and the gateway.")


def _add_device(asked: argparse.Namespace) -> None:
    from fedcross.deploy import bundle, control

    with tempfile.TemporaryDirectory(prefix="fedcross-") as work:
        public = bundle.make(Path(work), Path(asked.authority), asked.name, asked.address, asked.partition, asked.width)
        with control.connect(asked.superlink, asked.authority) as client:
            control.register(client, *control.read_public_key(public))
        if asked.output is None:
            bundle.write_tar(Path(work), sys.stdout.buffer)
        else:
            with asked.output.open("wb") as file:
                bundle.write_tar(Path(work), file)
    print(f"{asked.name} is registered for partition {asked.partition}. Unpack the bundle there.", file=sys.stderr)


def _register(asked: argparse.Namespace) -> None:
    from fedcross.deploy import control

    with control.connect(asked.superlink, asked.authority) as client:
        for path in asked.keys:
            key, partition = control.read_public_key(path)
            try:
                new = control.register(client, key, partition)
            except FederationError as error:
                if not asked.keep_going:
                    raise
                print(f"{path.name}: {error}", file=sys.stderr)
            else:
                print(f"{path.name}: {'registered for' if new else 'has'} partition {partition}", flush=True)


def _revoke(asked: argparse.Namespace) -> None:
    from fedcross.deploy import control

    with control.connect(asked.superlink, asked.authority) as client:
        node = control.revoke(client, asked.name)
    print(f"key {node.fingerprint} (partition {node.partition}) is revoked for good")


def _status(asked: argparse.Namespace) -> None:
    from fedcross.deploy import control, keys
    from fedcross.deploy.runs import summary
    from fedcross.engines.runs import listing

    with control.connect(asked.superlink, asked.authority) as client:
        print("\n".join(summary(asked.superlink, control.listing(client), listing(client))))
    authority = Path(asked.authority)
    for path in (authority, authority.with_name("server.crt")):
        if path.exists() and (said := keys.expires_soon(path)):
            print(f"WARNING: {said}")


def _start(asked: argparse.Namespace) -> None:
    from fedcross.deploy import start

    commands: dict[str, Callable[[], list[str]]] = {
        "superlink": lambda: start.superlink(asked.keys, asked.database, asked.listen or "127.0.0.1:8000"),
        "superexec": lambda: start.superexec(asked.keys, asked.superlink, asked.health),
        "gateway": lambda: start.gateway(
            asked.keys, asked.superlink, asked.listen or "0.0.0.0:8443", asked.page, asked.page_listen
        ),
        "device": lambda: start.device(asked.keys, asked.superlink, asked.partitions, asked.port, asked.width),
    }
    if asked.program != "superlink" and not asked.superlink:
        raise ConfigError(f"{asked.program}: which SuperLink? Give --superlink HOST:PORT.")
    start.replace_process(commands[asked.program]())


def _stop(asked: argparse.Namespace) -> None:
    from fedcross.deploy import control, runs
    from fedcross.engines.runs import listing, stop

    with control.connect(asked.superlink, asked.authority) as client:
        run = runs.chosen(listing(client), asked.run)
        if run.over:
            raise FederationError(f"run {run.run_id}: it is over already ({run.status}).")
        stop(client, run.run_id)
    print(f"run {run.run_id} is stopped. To go on: fedcross deploy resume {run.run_id}")


def _resume(asked: argparse.Namespace) -> None:
    from fedcross.deploy import control, runs
    from fedcross.engines.runs import listing

    with control.connect(asked.superlink, asked.authority) as client:
        known = listing(client)
    overrides = runs.continued(run := runs.chosen(known, asked.run), known, asked.settings)
    new = runs.resume(asked.superlink, asked.authority, overrides, not asked.detach)
    print(f"run {run.run_id} {'goes on' if asked.detach else 'went on'} as run {new}")


def _logs(asked: argparse.Namespace) -> None:
    from fedcross.deploy import control, runs
    from fedcross.engines import runs as flower

    with control.connect(asked.superlink, asked.authority) as client:
        run = runs.chosen(flower.listing(client), asked.run)
        if not (asked.follow or run.over):
            print(flower.so_far(client, run.run_id), end="")
            return
        ended = flower.follow(client, run.run_id, print)
        if asked.follow and ended.status != "finished:completed":
            raise FederationError(f"run {ended.run_id} is {ended.status}. {ended.details}".rstrip())


def _sample(asked: argparse.Namespace) -> None:
    from fedcross.deploy.sample import write

    print("\n".join(map(str, write(asked.folder, asked.devices))) or "there is data already")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedcross deploy", description=f"Keys, devices and programs of a federation (see {page('deploy.md')})."
    )
    parts = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        part: argparse.ArgumentParser = parts.add_parser(name, help=text, description=text)
        part.set_defaults(command=command)
        return part

    def at_server(part: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for option, variable in (("--superlink", SUPERLINK), ("--authority", AUTHORITY)):
            part.add_argument(option, default=os.environ.get(variable), help=f"or ${variable}")
        return part

    for name, command, text in (
        ("init", _init, "make missing keys and certificates, renew a certificate that expires within 14 days"),
        ("renew", _renew, "make a new server certificate"),
    ):
        part = add(name, command, text)
        part.add_argument("folder", type=Path)
        part.add_argument("--names", default="", help="further names of the gateway, separated by commas")
        if name == "init":
            part.add_argument("--device", action="append", default=[], metavar="NAME", help="a device of this machine")

    part = at_server(add("add-device", _add_device, "register a new device and write its bundle, a tar.gz file"))
    part.add_argument("name")
    part.add_argument("--partition", type=int, required=True, help="number of the device, from 0, unique")
    part.add_argument("--address", required=True, metavar="HOST:PORT", help="of the gateway, as the device reaches it")
    part.add_argument("--width", type=float, help="share of a model's channels that this device can train, such as 0.4")
    part.add_argument("--output", type=Path, help="file for the bundle (default: standard output)")

    part = at_server(add("register", _register, "register public keys for the partitions that they name"))
    part.add_argument("keys", nargs="+", type=Path, metavar="NAME-node.pub")
    part.add_argument("--keep-going", action="store_true", help="a refused key is named and leaves the others alone")

    part = at_server(add("revoke", _revoke, "shut a device out for good"))
    part.add_argument("name", help="partition-N, fingerprint or id as status shows them, or NAME-node.pub")

    at_server(add("status", _status, "devices, runs and certificates"))
    _start_parts(at_server(add("start", _start, "become a program of the federation")))

    at_server(add("stop", _stop, "stop a run; its checkpoints stay")).add_argument("run", help=RUN)
    part = at_server(add("resume", _resume, "go on with a run that was stopped or failed"))
    part.add_argument("run", help=RUN)
    part.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="further settings, such as rounds=200")
    part.add_argument("--detach", action="store_true", help="do not wait for the end of the run")
    part = at_server(add("logs", _logs, "print the log of a run's server"))
    part.add_argument("run", help=RUN)
    part.add_argument("--follow", action="store_true", help="until the run has ended; fails unless it completes")

    part = add("sample", _sample, "write sample data: digits, divided unevenly over the devices")
    part.add_argument("folder", type=Path)
    part.add_argument("devices", nargs="+", metavar="NAME")
    return parser


def _start_parts(part: argparse.ArgumentParser) -> None:
    part.add_argument("program", choices=["superlink", "superexec", "gateway", "device"])
    part.add_argument("--keys", type=Path, required=True, help="folder server of init, or keys of a device's bundle")
    part.add_argument("--listen", metavar="HOST:PORT", help="superlink: 127.0.0.1:8000, gateway: 0.0.0.0:8443")
    part.add_argument("--database", type=Path, default=Path("superlink.db"), help="superlink")
    part.add_argument("--health", default="127.0.0.1:9100", metavar="HOST:PORT", help="superexec")
    part.add_argument("--page", default="127.0.0.1:8080", metavar="HOST:PORT", help="gateway: page of the runs")
    part.add_argument("--page-listen", default="127.0.0.1:8444", metavar="HOST:PORT", help="gateway: its readers")
    part.add_argument("--partitions", type=int, metavar="N", help="device: how many there are, for Flower apps")
    part.add_argument("--port", type=int, default=9094, help="device: port of its own processes")
    part.add_argument("--width", type=float, help="device: share of a model's channels that it can train")
