from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.private_files import check_folder, check_private
from fedcross.core.trust import certificates
from fedcross.core.trust.keys import make_node_key, public_line


def test_node_keys_are_what_flower_reads(tmp_path: Path) -> None:
    pair = make_node_key(tmp_path / "nodes", "pi-1")
    private = load_ssh_private_key(pair.private.read_bytes(), None)
    public = load_ssh_public_key(pair.public.read_bytes())
    assert isinstance(private, ec.EllipticCurvePrivateKey)
    assert isinstance(private.curve, ec.SECP384R1)
    assert private.public_key() == public
    assert pair.public.read_text().startswith("ecdsa-sha2-nistp384 ")
    with pytest.raises(StorageError, match="has a key already"):
        make_node_key(tmp_path / "nodes", "pi-1")


@pytest.mark.parametrize("name", ["", "../x", "a/b", "-a", "a b", "ä", "x" * 64])
def test_device_names_that_would_be_no_file_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="use a to z"):
        make_node_key(tmp_path / "nodes", name)


def test_a_nodes_key_and_its_public_key_belong_together(tmp_path: Path) -> None:
    porch, barn = (make_node_key(tmp_path, name) for name in ("porch", "barn"))
    assert public_line(porch.private, "porch") == porch.public.read_bytes()
    porch.public.write_bytes(barn.public.read_bytes())
    with pytest.raises(StorageError, match=r"this is not the key of .*porch-node\.pub"):
        certificates.check_key(porch.private)
    porch.public.write_bytes(b"junk")
    with pytest.raises(StorageError, match=r"porch-node\.pub: this is no OpenSSH public key"):
        certificates.check_key(porch.private)


def test_a_key_where_this_user_may_not_look_is_an_error_in_words(tmp_path, monkeypatch):
    def closed(_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", closed)
    monkeypatch.setattr(Path, "is_dir", closed)
    for check in (check_private, check_folder):
        with pytest.raises(StorageError, match=r"may not look there\. Run as the owner of the keys"):
            check(tmp_path / "key")


@pytest.mark.parametrize("fails", [1, 2, "folder"])
def test_a_pair_that_cannot_be_written_is_not_replaced_by_halves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: int | str
) -> None:
    pair = make_node_key(tmp_path, "porch")
    before = pair.private.read_bytes()
    if fails == "folder":
        pair.public.unlink()
        pair.public.mkdir()
    calls, sync = [], os.fsync

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"porch-node\.pub, porch-node\.key: cannot be written"):
        make_node_key(tmp_path, "porch", replace=True)
    assert pair.private.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"porch-node.key", "porch-node.pub"}
