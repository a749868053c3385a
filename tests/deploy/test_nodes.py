"""How ``fedcross deploy revoke`` and ``nodes`` name the devices that a SuperLink knows."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

from fedcross.core.admission import fingerprint
from fedcross.core.errors import FederationError
from fedcross.core.keys import make_node_key
from fedcross.deploy import nodes
from tests.deploy.test_device import FakeSuperLink
from tests.support.command import subcommand

deploy = subcommand("deploy")
WHERE = ["--superlink", "h:1", "--authority", "ca.crt"]


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Any:
    link: Any = FakeSuperLink()
    monkeypatch.setattr(nodes, "connect", lambda *_: contextlib.nullcontext(link))
    return link


def test_a_device_whose_public_key_is_gone_is_revoked_by_number_or_fingerprint(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_node_key(tmp_path / "keys", "shed").public
    key = nodes.read_public_key(file.read_bytes(), "shed")
    for one in (b"a", b"b", b"c", key):
        nodes.register(link, one)
    assert deploy(["nodes", *WHERE]) == 0
    number, _, shown = capsys.readouterr().out.splitlines()[1].split()[:3]
    assert (number, shown) == ("2", fingerprint(b"b"))
    assert deploy(["revoke", *WHERE, "1", shown, str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "1: node 1 is revoked", f"{shown}: node 2 is revoked", f"{file}: node 4 is revoked",
    ]  # fmt: skip
    assert [node.key for node in nodes.alive(nodes.listing(link))] == [b"c"]


def test_a_name_that_no_node_has_or_two_have_is_an_error(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes.register(link, b"a")
    nodes.register(link, b"b")
    for name in ("7", "0123456789abcdef"):
        with pytest.raises(FederationError, match=r"^no registered node has this number .* deploy nodes"):
            nodes.called(link, name)
    nodes.revoke(link, b"a")
    for name in ("1", fingerprint(b"a")):
        with pytest.raises(FederationError, match="It was revoked already"):
            nodes.called(link, name)
    nodes.register(link, b"c")
    monkeypatch.setattr(nodes, "fingerprint", lambda key: "3" if key == b"b" else "x")  # of node 2
    with pytest.raises(FederationError, match=r"^nodes 2 and 3 are meant\."):
        nodes.called(link, "3")


def test_a_file_with_the_name_of_a_node_is_the_file(
    link: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes.register(link, b"a")
    nodes.register(link, nodes.read_public_key(make_node_key(tmp_path, "shed").public.read_bytes(), "shed"))
    Path("shed-node.pub").rename("1")
    assert deploy(["revoke", *WHERE, "1"]) == 0
    assert capsys.readouterr().out == "1: node 2 is revoked\n"


def test_nodes_says_what_register_says_of_a_key_without_a_partition(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_node_key(tmp_path, "shed").public
    assert deploy(["register", *WHERE, str(file)]) == 0
    said = "no partition: the server gives it none where other keys have one"
    assert capsys.readouterr().out == f"{file}: node 1, {said}\n"
    assert deploy(["nodes", *WHERE]) == 0
    assert capsys.readouterr().out.endswith(f"  {said}\n")


def test_one_that_cannot_be_revoked_keeps_no_other_in(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = make_node_key(tmp_path / "keys", "shed").public
    nodes.register(link, nodes.read_public_key(file.read_bytes(), "shed"))
    assert deploy(["revoke", *WHERE, "7", str(file), "8"]) == 1
    said = capsys.readouterr()
    assert said.out == f"{file}: node 1 is revoked\n"
    assert len(said.err.splitlines()) == 2
    assert "7: no registered node has this number" in said.err.splitlines()[0]
    assert said.err.splitlines()[1].startswith("8: no registered node has this number")
