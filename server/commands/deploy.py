"""``fedcross deploy``: makes keys and certificates of a federation of devices and starts its programs.

::

    fedcross deploy new-client --superlink fl.example.org:8443 --partition 3 --partitions 4 ca.crt devices porch
    fedcross deploy register   --partition 3 porch-node.pub          # at the server
    fedcross deploy revoke     porch-node.pub
    fedcross deploy nodes
    fedcross deploy runs
    fedcross deploy status
    fedcross deploy stop       last
    fedcross deploy resume     last
    fedcross deploy logs       last --follow
    fedcross deploy authority  keys/ca
    fedcross deploy server     keys/ca keys/server superlink.example.org 192.0.2.7
    fedcross deploy check      keys/ca/ca.crt keys/server/server.crt keys/server/server.key
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.paths import page
from fedcross.core.trust.signing import AUTHORITY_DAYS, MAX_LEAF_DAYS
from fedcross.deploy.actions import devices, keys, programs, runs
from fedcross.engines import guarded
from fedcross.engines.remote import host_and_port
from fedcross.server.commands.device_checks import CLOCK, check_server

#: Environment variables with the SuperLink's address and the authority's certificate, for commands at the server.
SUPERLINK = "FEDCROSS_SUPERLINK"
AUTHORITY = "FEDCROSS_AUTHORITY"
PUBLIC, SHOWN = "public keys; - for standard input", "; or numbers or fingerprints, as nodes lists them"
PARTITIONS = "number of devices, above --partition; runs of the fedcross command do not use it"


def main(arguments: Sequence[str]) -> int:
    """Run the command; the exit code is 0, 1 if the SuperLink refuses, 2 for wrong use or unusable files."""
    os.umask(0o077)
    if "PRIVATE KEY-----" in " ".join(arguments):  # before any message repeats it
        raise ConfigError("A private key stands among the arguments. Give a file's name, not its content.")
    parser = _parser()
    asked, rest = parser.parse_known_args(arguments)
    if rest and ("settings" not in asked or any(one.startswith("-") for one in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:  # argparse takes no settings behind an option
        asked.settings += rest
    command: Callable[[argparse.Namespace], None] = asked.command
    command(asked)
    return 0


def _supernode(arguments: argparse.Namespace) -> None:
    """Become a SuperNode, unless this device's clock is one that the server refuses.

    Flower's SuperNode would end with exit code 0 and no reason.

    Raises
    ------
    FederationError
        If the clock is too far ahead or behind. A server that does not answer is the SuperNode's own to wait for.
    ConfigError
        If the address has another form.
    """
    host_and_port(arguments.superlink)
    for finding in check_server(arguments.superlink, arguments.keys / "ca.crt"):
        if finding.kind == "FAULT" and finding.text.startswith(CLOCK):
            raise FederationError(finding.text)
    programs.supernode(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fedcross deploy",
        description=f"Keys, certificates and programs of a federation (see {page('deploy.md')}).",
    )
    parts = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> argparse.ArgumentParser:
        part: argparse.ArgumentParser = parts.add_parser(name, help=text, description=text)
        part.set_defaults(command=command)
        return part

    _device_parts(add)
    _certificate_parts(add)
    _program_parts(add)
    _run_parts(add)
    return parser


Add = Callable[[str, Callable[[argparse.Namespace], None], str], argparse.ArgumentParser]


def _device_parts(add: Add) -> None:
    part = add("new-client", devices.new_client, "make the bundle of a new edge device")
    part.add_argument("authority", type=Path, help="the federation's ca.crt")
    part.add_argument("folder", type=Path, help="folder for the bundle, which becomes FOLDER/NAME")
    part.add_argument("name", help="the device's name")
    part.add_argument(
        "--superlink", required=True, metavar="HOST:PORT", help="address of the gateway, as the device reaches it"
    )
    part.add_argument("--partition", type=int, required=True, help="number of the device, from 0, unique")
    part.add_argument("--partitions", type=int, required=True, help=PARTITIONS)
    part.add_argument("--width", type=float, help="share of a model's channels that this device can train, such as 0.4")

    part = add("rotate-key", devices.rotate_key, "give a device a new key; revoke the old one and register it")
    part.add_argument("bundle", type=Path, help="the folder that new-client made")
    part.add_argument(
        "--secret", action="store_true", help="make superexec.key anew and nothing else; the device stays registered"
    )

    for name, command, text in (
        ("register", devices.register, "admit devices (at the server)"),
        ("revoke", devices.revoke, "shut devices out (at the server)"),
    ):
        part = add(name, command, text)
        part.add_argument("keys", nargs="+", metavar="KEY.pub", help=PUBLIC + (SHOWN if name == "revoke" else ""))
        _superlink_options(part)
        if name == "register":
            bound = part.add_mutually_exclusive_group()
            bound.add_argument(
                "--no-partition",
                action="store_true",
                help="for none, though other keys have one: such a device takes part in no run of fedcross",
            )
            bound.add_argument(
                "--partition",
                type=int,
                action="append",
                default=[],
                metavar="N",
                help="the key's partition, which no other key can take; once for each key, in their order",
            )
            part.add_argument(
                "--skip-revoked",
                action="store_true",
                help="a key that was revoked is told and left out, and no error; nor is one that was registered "
                "without a partition, where no key has one",
            )
    _superlink_options(add("nodes", devices.nodes, "list the admitted devices (at the server)"))


def _superlink_options(part: argparse.ArgumentParser) -> None:
    part.add_argument("--superlink", metavar="HOST:PORT", default=os.environ.get(SUPERLINK), help=f"or ${SUPERLINK}")
    part.add_argument("--authority", metavar="ca.crt", default=os.environ.get(AUTHORITY), help=f"or ${AUTHORITY}")


def _certificate_parts(add: Add) -> None:
    part = add("authority", keys.authority, "make the certificate authority; keep its key offline")
    part.add_argument("folder", type=Path)
    part.add_argument("--days", type=int, default=AUTHORITY_DAYS)

    part = add("server", keys.server, "make or rotate the server's certificate")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("folder", type=Path)
    part.add_argument("names", nargs="+", metavar="NAME", help="host name or IP address that clients use")
    part.add_argument("--days", type=int, default=MAX_LEAF_DAYS)

    part = add("client", keys.client, "make or rotate a client certificate, for a gateway that asks for one")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument("folder", type=Path)
    part.add_argument("name", help="the device's name")
    part.add_argument("--days", type=int, default=MAX_LEAF_DAYS)

    part = add("revoke-certificate", keys.revoke_certificate, "put certificates on the authority's list ca.crl")
    part.add_argument("authority", type=Path, help="folder of ca.crt and ca.key")
    part.add_argument(
        "files",
        type=Path,
        nargs="*",
        metavar="FILE.crt",
        help="certificates to revoke; without any, renew the dates of the list",
    )

    part = add("node", keys.node, "make a SuperNode's key pair")
    part.add_argument("folder", type=Path)
    part.add_argument("name", help="the device's name")

    part = add("check", keys.check, "check signatures, dates and file modes")
    part.add_argument("authority", type=Path, help="the authority's certificate, ca.crt")
    part.add_argument("files", type=Path, nargs="+", metavar="FILE", help="certificates (.crt), keys (.key), ca.crl")


def _program_parts(add: Add) -> None:
    part = add("federation", keys.federation, "make all missing keys and certificates, renew those that expire soon")
    part.add_argument("folder", type=Path)
    part.add_argument(
        "--device", action="append", default=[], metavar="NAME", help="name of a device that gets a key here"
    )
    part.add_argument(
        "--names", default="", help="further names of the gateway, separated by commas; earlier ones stay"
    )

    part = add("kubernetes", programs.kubernetes, "write the federation as Kubernetes manifests")
    part.add_argument("folder", type=Path, help="new folder for the manifests")
    part.add_argument("--keys", type=Path, required=True, help="the folder that fedcross deploy federation made")
    part.add_argument(
        "--device", type=Path, action="append", default=[], metavar="BUNDLE", help="bundle of a device in the cluster"
    )
    part.add_argument(
        "--env", type=Path, metavar="FILE", help="the compose file's settings; variables of the shell win"
    )
    part.add_argument("--namespace", default="fedcross")
    part.add_argument("--sample", action="store_true", help="sample data in place of the claims NAME-data")

    part = add("sample", programs.sample, "write sample data: digits, divided unevenly over the devices")
    part.add_argument("folder", type=Path)
    part.add_argument("devices", nargs="+", metavar="NAME")

    part = add("superlink", programs.superlink, "become the SuperLink")
    part.add_argument("keys", type=Path, help="folder of ca.crt, server.crt and server.key")
    part.add_argument("--secret", type=Path, required=True, help="folder of the SuperExec's secret")
    part.add_argument("--database", type=Path, required=True)
    part.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; anyone who reaches it controls the federation"
    )

    part = add("gateway", programs.gateway, "become the gateway (HAProxy), the only door for devices")
    part.add_argument("keys", type=Path, help="folder of ca.crt, server.crt and server.key")
    part.add_argument("--work", type=Path, required=True, help="folder for its configuration and socket")
    part.add_argument("--superlink", metavar="HOST:PORT", default="127.0.0.1:8000")
    part.add_argument("--listen", metavar="HOST:PORT", default="0.0.0.0:8443", help="where devices come in")

    part = add("superexec", programs.superexec, "run as the SuperExec, which starts ServerApps")
    part.add_argument("keys", type=Path, help="folder of ca.crt and the secret")
    part.add_argument("--superlink", required=True, metavar="HOST:PORT")
    part.add_argument("--health", default="127.0.0.1:9100", metavar="HOST:PORT")
    part.add_argument("--memory", metavar="SIZE", help="limit of memory for each ServerApp, for example 3g")
    part.add_argument("--runs", type=int, metavar="N", help=f"runs at once; further ones wait (or ${guarded.RUNS})")

    part = add("supernode", _supernode, "run as a device's SuperNode")
    part.add_argument("keys", type=Path, help="folder of ca.crt, NAME-node.key and superexec.key")
    part.add_argument("--name", required=True)
    part.add_argument("--superlink", required=True, metavar="HOST:PORT", help="the gateway")
    part.add_argument("--partition", type=int, required=True)
    part.add_argument("--partitions", type=int, required=True, help=PARTITIONS)
    part.add_argument(
        "--port", type=int, default=9094, help="port for processes of this machine; a different one for each SuperNode"
    )
    part.add_argument("--width", type=float, help="share of a model's channels that this device can train, such as 0.4")


def _run_parts(add: Add) -> None:
    which = f"Flower's id of the run, its folder or the folder's name, or {runs.LAST} for the newest"
    _superlink_options(add("runs", runs.show, "list the runs (at the server)"))
    _superlink_options(add("status", runs.status, "devices and runs in a few lines (at the server)"))

    part = add("stop", runs.stop, "stop runs; their checkpoints stay (at the server)")
    part.add_argument("runs", nargs="+", metavar="RUN", help=which)
    _superlink_options(part)

    part = add("resume", runs.resume, "go on with a run that was stopped or failed (at the server)")
    part.add_argument("run", metavar="RUN", help=which)
    part.add_argument("settings", nargs="*", metavar="NAME=VALUE", help="further settings, such as rounds=200")
    part.add_argument("--detach", action="store_true", help="do not wait for the end of the run")
    _superlink_options(part)

    part = add("logs", runs.logs, "print the log of a run's server (at the server)")
    part.add_argument("run", metavar="RUN", help=which)
    part.add_argument("--follow", action="store_true", help="until the run has ended; fails unless it completes")
    _superlink_options(part)
