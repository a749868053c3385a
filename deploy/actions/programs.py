"""The actions of ``fedcross deploy`` that become a program of Flower's or write what others start."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from fedcross.core import ports
from fedcross.core.errors import ConfigError, quoted
from fedcross.deploy import start
from fedcross.engines import guarded
from fedcross.engines.remote import host_and_port

if TYPE_CHECKING:
    pass


def kubernetes(arguments: argparse.Namespace) -> None:
    """Write the federation as Kubernetes manifests."""
    from fedcross.deploy.kubernetes.manifests import write
    from fedcross.deploy.kubernetes.plan import Plan, read_bundle, read_settings

    plan = Plan(
        arguments.keys,
        tuple(map(read_bundle, arguments.device)),
        read_settings(arguments.env, os.environ),
        arguments.namespace,
        arguments.sample,
    )
    print("\n".join(map(str, write(plan, arguments.folder))))
    print(f"The secrets among them are private keys. Then: kubectl apply -f {quoted(arguments.folder)}")


def sample(arguments: argparse.Namespace) -> None:
    """Write sample data."""
    from fedcross.deploy.sample import write

    os.umask(0o022)
    print("\n".join(map(str, write(arguments.folder, arguments.devices))) or "nothing to do")


def superlink(arguments: argparse.Namespace) -> None:
    """Become the SuperLink."""
    command = start.superlink(arguments.keys, arguments.secret, arguments.database, arguments.host)
    os.environ.update(start.gateway_of(arguments.keys))
    ports.check(arguments.host, start.SUPERLINK_PORT, f"--host {arguments.host}", "address")
    start.hold(arguments.database)
    start.replace_process(command)


def gateway(arguments: argparse.Namespace) -> None:
    """Become the gateway, HAProxy."""
    from fedcross.deploy.gateway import prepare

    ports.check(*host_and_port(arguments.listen), f"--listen {arguments.listen}")
    start.replace_process(prepare(arguments.keys, arguments.work, arguments.superlink, arguments.listen))


def superexec(arguments: argparse.Namespace) -> None:
    """Become the SuperExec."""
    if arguments.memory:
        start.limit_memory(arguments.memory)
    if arguments.runs is not None:
        os.environ[guarded.RUNS] = str(arguments.runs)
    try:
        guarded.most_runs(os.environ.get(guarded.RUNS))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    command = start.superexec(arguments.keys, arguments.superlink, arguments.health)
    ports.check(*host_and_port(arguments.health), f"--health {arguments.health}")
    # The user who starts a run must be able to read its files: group and others get read access.
    start.replace_process(command, umask=0o002)


def supernode(arguments: argparse.Namespace) -> None:
    """Become a device: a SuperNode and what answers its messages."""
    own = (arguments.partition, arguments.partitions, arguments.port, arguments.width)
    command = start.supernode(arguments.keys, arguments.name, arguments.superlink, *own)
    ports.check("127.0.0.1", arguments.port, f"--port {arguments.port}")
    start.replace_process(command)
