"""Registering and revoking, against a stand-in for Flower's Control API that keeps nodes as the SuperLink does."""

from types import SimpleNamespace

import pytest

from fedcross.core.errors import ConfigError, FederationError
from fedcross.deploy import control
from fedcross.engines.certificates import make_node_key


class Client:
    """A SuperLink with a list of nodes."""

    def __init__(self):
        self.nodes = []

    def ListNodes(self, request):
        return SimpleNamespace(nodes_info=self.nodes)

    def RegisterNode(self, request):
        node = SimpleNamespace(node_id=len(self.nodes) + 1, public_key=request.public_key, name=request.name)
        node.status = "registered"
        self.nodes.append(node)
        return node

    def UnregisterNode(self, request):
        next(node for node in self.nodes if node.node_id == request.node_id).status = control.REVOKED


@pytest.fixture
def key(tmp_path):
    def made(name, partition):
        return control.read_public_key(make_node_key(tmp_path, name, f"{name} partition-{partition}").public)

    return made


def test_a_key_has_one_partition_and_a_partition_one_key(key):
    client, first, second = Client(), key("a", 0), key("b", 0)
    assert (control.register(client, *first), control.register(client, *first)) == (True, False)
    with pytest.raises(FederationError, match="partition 0: it belongs to key"):
        control.register(client, *second)
    with pytest.raises(FederationError, match="registered for partition 0"):
        control.register(client, first[0], 1)
    assert control.register(client, second[0], 1)


@pytest.mark.parametrize("called", ["partition-0", "1", "fingerprint", "file"])
def test_a_revoked_key_never_comes_back_and_frees_its_partition(key, tmp_path, called):
    client, first, second = Client(), key("a", 0), key("b", 0)
    control.register(client, *first)
    (node,) = control.listing(client)
    name = {"fingerprint": node.fingerprint, "file": str(tmp_path / "a-node.pub")}.get(called, called)
    assert control.revoke(client, name) == node
    with pytest.raises(FederationError, match="revoked"):
        control.register(client, *first)
    assert control.register(client, *second)
    with pytest.raises(FederationError, match="0 registered devices"):
        control.revoke(client, node.fingerprint)


@pytest.mark.parametrize("content", [None, b"-----BEGIN PRIVATE KEY-----\nsecret", b"ssh-rsa x", b"\xff"])
def test_what_is_no_public_key_is_refused_without_its_content(tmp_path, content):
    path = tmp_path / "x.pub"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="public key") as told:
        control.read_public_key(path)
    assert "secret" not in str(told.value)


def test_without_an_address_the_command_says_what_is_missing():
    with pytest.raises(ConfigError, match="--superlink"), control.connect(None, "ca.crt"):
        pass
