"""How ``fedcross deploy revoke`` and ``nodes`` name the devices that a SuperLink knows."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import HTTPException

from fedcross.core.errors import FederationError, StorageError
from fedcross.core.trust.admission import fingerprint
from fedcross.core.trust.keys import make_node_key, read_public_key
from fedcross.deploy import nodes
from fedcross.engines.executor import admitted
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
    said = "bound to no partition: it has the one that it names"
    assert capsys.readouterr().out == f"{file}: node 1, {said}\n"
    assert deploy(["nodes", *WHERE]) == 0
    assert capsys.readouterr().out.endswith(f"  {said}\n")
    nodes.register(link, b"another", 0)
    said = "no partition: the server gives it none, as other keys have one"
    assert deploy(["register", *WHERE, str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: node 1, {said}, already registered\n"
    assert deploy(["nodes", *WHERE]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith(f"  {said}")


def test_a_revoked_key_is_called_so_and_has_no_partition(link: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nodes.register(link, b"old", 6)
    nodes.register(link, b"plain")
    for key in (b"old", b"plain"):
        nodes.revoke(link, key)
    nodes.register(link, b"new", 6)
    assert deploy(["nodes", *WHERE]) == 0
    assert [line.split()[1:] for line in capsys.readouterr().out.splitlines()] == [
        ["revoked", fingerprint(b"old"), "(had", "partition", "6)"],
        ["revoked", fingerprint(b"plain")],
        ["registered", fingerprint(b"new"), "partition", "6"],
    ]


def test_a_partition_cannot_be_taken_off_a_key(link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(make_node_key(tmp_path, "shed").public)
    assert deploy(["register", *WHERE, "--partition", "0", file]) == 0
    assert deploy(["register", *WHERE, file]) == 0
    capsys.readouterr()
    assert deploy(["register", *WHERE, "--no-partition", file]) == 1
    assert f"{file}: node 1 keeps partition 0: that cannot be taken off a key." in capsys.readouterr().err


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


def test_a_file_that_cannot_be_read_keeps_no_other_key_in(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes.register(link, b"a")
    (tmp_path / "junk.pub").write_text("junk")
    files = [str(tmp_path / name) for name in ("junk.pub", "none.pub")]
    assert deploy(["revoke", *WHERE, "1", "999", *files]) == 2
    said = capsys.readouterr()
    assert said.out == "1: node 1 is revoked\n"
    assert len(said.err.splitlines()) == 3
    assert "none.pub: this key cannot be read" in said.err
    assert "junk.pub: this is no OpenSSH public key" in said.err
    assert "999: no registered node has this number" in said.err


def test_a_revoked_key_whose_partition_another_one_has_is_told_so(link: Any) -> None:
    """Who revoked the other one, as for a partition that is taken, would shut an honest device out for good."""
    nodes.register(link, b"old", 0)
    nodes.revoke(link, b"old")
    nodes.register(link, b"new", 0)
    for partition in (0, 1, None):
        with pytest.raises(FederationError, match="it was revoked, and a revoked key is never accepted again"):
            nodes.register(link, b"old", partition)
    with pytest.raises(FederationError, match=r"belongs to key .* Choose another partition\. Only if that key is out"):
        nodes.register(link, b"third", 0)


def test_a_key_that_cannot_be_bound_any_more_is_refused_where_others_are_bound(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where none is bound, as an earlier version registered them, each device has the partition that it names."""
    files = [str(make_node_key(tmp_path, name).public) for name in ("shed", "barn")]
    assert deploy(["register", *WHERE, files[0]]) == 0
    capsys.readouterr()
    assert deploy(["register", *WHERE, "--skip-revoked", "--partition", "1", files[0]]) == 0  # as a start does
    assert "not bound to partition 1: it needs a new key for that" in capsys.readouterr().out
    assert deploy(["register", *WHERE, "--partition", "1", files[0]]) == 1
    assert "this cannot be changed. To bind the device to one: revoke it, give" in capsys.readouterr().err
    assert deploy(["register", *WHERE, "--partition", "1", "--partition", "2", *files]) == 1
    said = capsys.readouterr()
    assert f"{files[1]}: node 2, partition 2" in said.out
    assert f"{files[0]}: node 1 was registered without a partition, and this cannot be changed" in said.err
    assert "register that with --partition 1" in said.err


def test_a_new_key_without_a_partition_is_not_spent_where_others_have_one(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(make_node_key(tmp_path, name).public) for name in ("shed", "barn", "porch")]
    assert deploy(["register", *WHERE, files[0]]) == 0  # as every key of that federation
    assert deploy(["register", *WHERE, "--partition", "1", files[1]]) == 0
    capsys.readouterr()
    assert deploy(["register", *WHERE, *files]) == 1
    said = capsys.readouterr()
    assert [line.rsplit(", ", 1)[-1] for line in said.out.splitlines()] == ["already registered"] * 2
    assert f"{files[2]}: not registered: other keys have a partition" in said.err
    assert len(nodes.listing(link)) == 2
    assert deploy(["register", *WHERE, "--partition", "2", files[2]]) == 0
    assert deploy(["register", *WHERE, "--no-partition", str(make_node_key(tmp_path, "loft").public)]) == 0
    assert [one.partition for one in nodes.listing(link)] == [None, 1, 2, None]
    assert deploy(["revoke", *WHERE, files[2]]) == 0
    capsys.readouterr()
    assert deploy(["register", *WHERE, files[2]]) == 1
    assert "it was revoked" in capsys.readouterr().err


def test_a_key_that_is_refused_keeps_no_other_out(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(make_node_key(tmp_path, name).public) for name in ("shed", "barn", "porch")]
    assert deploy(["register", *WHERE, "--partition", "0", files[0]]) == 0
    assert deploy(["revoke", *WHERE, files[0]]) == 0
    nodes.register(link, b"another", 1)
    capsys.readouterr()
    partitions = [word for number in "012" for word in ("--partition", number)]
    assert deploy(["register", *WHERE, *partitions, *files]) == 1
    said = capsys.readouterr()
    assert said.out == f"{files[2]}: node 3, partition 2\n"
    revoked, taken, *_ = said.err.splitlines()
    assert f"{files[0]}: key " in revoked
    assert "it was revoked, and a revoked key is never accepted again" in revoked
    assert f"{files[1]}: partition 1: it belongs to key " in taken


def test_a_key_that_was_revoked_on_purpose_is_no_error_for_who_says_so(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(make_node_key(tmp_path, name).public) for name in ("shed", "barn")]
    asked = ["register", *WHERE, "--skip-revoked", "--partition", "0", "--partition", "1", *files]
    assert deploy(asked) == 0
    assert deploy(["revoke", *WHERE, files[0]]) == 0
    capsys.readouterr()
    assert deploy(asked) == 0
    said = capsys.readouterr()
    assert said.out == f"{files[1]}: node 2, partition 1, already registered\n"
    assert said.err.startswith(f"{files[0]}: left out: key ")
    assert "it was revoked" in said.err
    assert deploy(["revoke", *WHERE, files[1]]) == 0
    nodes.register(link, b"another", 1)
    third = str(make_node_key(tmp_path, "porch").public)
    assert deploy(["register", *WHERE, "--skip-revoked", "--partition", "1", third]) == 1  # refused otherwise


def test_a_key_that_is_shut_out_but_not_on_record_is_told_and_keeps_no_other_in(
    link: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in (b"a", b"b"):
        nodes.register(link, key)
    gone = link.UnregisterNode

    def unrecorded(request: Any) -> None:
        gone(request)
        asked = httpx.Request("POST", "https://superlink/v1/control/unregister-node")
        if request.node_id == 1:
            httpx.Response(507, json={"detail": "revoked, but no room"}, request=asked).raise_for_status()

    monkeypatch.setattr(link, "UnregisterNode", unrecorded)
    assert deploy(["revoke", *WHERE, "1", "2"]) == 1
    said = capsys.readouterr()
    assert said.out == "2: node 2 is revoked\n"
    assert said.err.strip() == "fedcross deploy: 1: node 1: revoked, but no room"


def test_of_keys_that_are_registered_for_a_partition_at_once_one_gets_it(
    link: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each operator has looked before one of them registered: the SuperLink itself refuses the others."""
    looks = threading.Barrier(3)
    state = SimpleNamespace(get_node_info=lambda: link.known)
    guarded = admitted.one_key(lambda request, account, state: FakeSuperLink.RegisterNode(link, request))

    looked = threading.local()

    def listed(_: object) -> Any:
        found = SimpleNamespace(nodes_info=list(link.known))
        if not hasattr(looked, "once"):  # who registers looks again afterwards
            looked.once = True
            looks.wait()
        return found

    def registered(request: Any) -> Any:
        try:
            return guarded(request, None, state)
        except HTTPException as error:
            asked = httpx.Request("POST", "https://superlink/v1/control/register-node")
            return httpx.Response(error.status_code, json={"detail": error.detail}, request=asked).raise_for_status()

    monkeypatch.setattr(link, "ListNodes", listed)
    monkeypatch.setattr(link, "RegisterNode", registered)

    def told(key: bytes) -> str:
        try:
            nodes.register(link, key, 2)
        except FederationError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        said = sorted(pool.map(told, (b"a", b"b", b"c")))
    assert said[0] == ""
    key = fingerprint(link.known[0].public_key)
    assert said[1:] == [f"partition 2: it belongs to key {key} (node 1). Choose another partition."] * 2
    assert len(link.known) == 1


def test_a_partition_of_a_revoked_key_and_a_node_without_one_are_free_at_the_superlink(link: Any) -> None:
    state = SimpleNamespace(get_node_info=lambda: link.known)
    guarded = admitted.one_key(lambda request, account, state: FakeSuperLink.RegisterNode(link, request))
    for key, name in ((b"a", "partition-2"), (b"b", ""), (b"c", ""), (b"d", "own"), (b"e", "own")):
        guarded(SimpleNamespace(public_key=key, name=name), None, state)
    link.UnregisterNode(SimpleNamespace(node_id=1))
    guarded(SimpleNamespace(public_key=b"f", name="partition-2"), None, state)
    with pytest.raises(HTTPException, match="409: partition 2: it belongs to key"):
        guarded(SimpleNamespace(public_key=b"g", name="partition-2"), None, state)


def test_a_partition_that_no_key_can_be_bound_to_is_refused(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two keys got the same one: the server reads nine digits."""
    file = str(make_node_key(tmp_path, "shed").public)
    assert deploy(["register", *WHERE, "--partition", "1000000000", file]) == 2
    assert "--partition 1000000000: give one number from 0 to 999999999" in capsys.readouterr().err
    assert not link.known
    assert deploy(["register", *WHERE, "--partition", "999999999", file]) == 0
    assert nodes.listing(link)[0].partition == 999_999_999
    assert admitted.NAME.fullmatch(link.known[0].name)


def test_register_reports_what_the_superlink_keeps(
    link: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(make_node_key(tmp_path, "shed").public)
    enter = link.RegisterNode
    monkeypatch.setattr(
        link, "RegisterNode", lambda request: enter(SimpleNamespace(public_key=request.public_key, name=""))
    )
    assert deploy(["register", *WHERE, "--partition", "3", file]) == 1
    assert capsys.readouterr().out.startswith(f"{file}: node 1, not bound to partition 3: it needs a new key")
    monkeypatch.setattr(link, "RegisterNode", lambda request: SimpleNamespace(node_id=7))
    with pytest.raises(FederationError, match="registered as node 7, and not listed"):
        nodes.register(link, b"other")


@pytest.mark.parametrize("command", ["register", "revoke", "rotate-key"])
def test_a_key_that_stands_among_the_arguments_is_not_printed(
    link: Any, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    key = make_node_key(tmp_path, "shed").private.read_text().strip()
    where, part = ([], []) if command == "rotate-key" else (WHERE, ["\n".join(key.splitlines()[1:3])])
    for given in filter(None, ([key], key.split(), part)):
        assert deploy([command, *where, *given]) == 2
        said = "".join(capsys.readouterr())
        assert "Give a file's name, not its content" in said
        assert not [line for line in key.splitlines() if line in said]


def test_what_a_file_has_in_place_of_a_public_key_is_not_printed(
    link: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "token").write_text("byzk-0123456789abcdef-0123456789")
    assert deploy(["register", *WHERE, str(tmp_path / "token")]) == 2
    said = capsys.readouterr().err
    assert "token: this is no OpenSSH public key. Give the device's .pub file." in said
    assert "byzk" not in said
    with pytest.raises(StorageError, match="this is no OpenSSH public key") as caught:
        read_public_key(tmp_path / "token")
    assert "byzk" not in str(caught.value)
