import contextlib
import errno
import os
import socket
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedcross.core.causes import cause_of
from fedcross.server.commands import doctor


def kinds(findings):
    return [finding.kind for finding in findings]


def test_ports():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert doctor.check_listen(port, "127.0.0.1").kind == "FAULT"
        assert doctor.check_connect(f"127.0.0.1:{port}").kind == "ok"
    assert doctor.check_listen(port, "127.0.0.1").kind == "ok"
    assert doctor.check_connect(f"127.0.0.1:{port}").kind == "FAULT"


def test_disk(tmp_path):
    assert kinds(doctor.check_disk(tmp_path / "not" / "yet", least=1)) == ["ok"]
    (found,) = doctor.check_disk(tmp_path, least=2**70)
    assert found.kind == "FAULT"
    assert "Free space" in found.text
    (tmp_path / "file").touch()
    assert kinds(doctor.check_disk(tmp_path / "file" / "run")) == ["FAULT"]


FULL = SimpleNamespace(f_flag=0, f_files=9, f_favail=0, f_bavail=1 << 30, f_frsize=4096)


@pytest.mark.parametrize(
    ("said", "told", "cause"),
    [
        (errno.ENOSPC, "No space left on device, no more files (inodes)", "disk_full"),
        (errno.EDQUOT, "Disk quota exceeded", "quota_exceeded"),
        (None, "only 0 more files fit there (inodes)", "disk_full"),
    ],
)
def test_a_disk_that_takes_nothing_has_a_cause(tmp_path, monkeypatch, said, told, cause):
    def full(**_):
        raise OSError(said, os.strerror(said))

    monkeypatch.setattr(doctor.os, "statvfs", lambda _: FULL)
    if said:
        monkeypatch.setattr(doctor.tempfile, "TemporaryFile", full)
    (found,) = doctor.check_disk(tmp_path)
    assert (found.kind, told in found.text, cause_of(found.text).name) == ("FAULT", True, cause)


def test_too_small_and_read_only_disks_have_a_cause(tmp_path, monkeypatch):
    (small,) = doctor.check_disk(tmp_path, least=2**70)
    monkeypatch.setattr(doctor.os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    (closed,) = doctor.check_disk(tmp_path)
    assert [cause_of(found.text).name for found in (small, closed)] == ["disk_full", "read_only"]


def test_a_folder_below_somebody_elses(tmp_path, monkeypatch):
    closed, exists = tmp_path / "closed" / "outputs", Path.exists

    def hidden(path):
        if path == closed:
            raise PermissionError(13, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", hidden)
    (found,) = doctor.check_disk(closed)
    assert "GiB free" in found.text


def test_data(tmp_path):
    assert kinds(doctor.check_data(tmp_path / "none", required=True)) == ["FAULT"]
    assert kinds(doctor.check_data(tmp_path / "none", required=False)) == ["note"]
    (wrong,) = doctor.check_data(tmp_path / "none", required=False, named=True)
    assert (wrong.kind, "FEDCROSS_DATA names it" in wrong.text) == ("FAULT", True)
    (tmp_path / "none").mkdir()
    assert kinds(doctor.check_data(tmp_path / "none", required=True)) == ["FAULT"]
    (tmp_path / "none" / "cifar10").mkdir()
    assert kinds(doctor.check_data(tmp_path / "none", required=True)) == ["ok"]


def test_a_folder_of_keys_is_no_place_for_runs_or_data(tmp_path):
    """As a run would be refused there; the SuperLink's own folder is only looked at for room, with --database."""
    for name in ("keys/server/server.key", "keys/public/ca.crt", "state/superlink.db"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    keys, state = tmp_path / "keys", tmp_path / "state"
    for folder, what in (
        (keys, "a folder of folders of keys, with server/server.key"),
        (keys / "server", "a folder of keys, with server.key"),
        (state, "the SuperLink's folder, with superlink.db"),
    ):
        (found,) = doctor.check_output(folder, None)
        assert found == doctor.fault(f"{folder}: {what}. No run writes there: choose another --output.")
    assert not [*doctor.check_output(tmp_path / "outputs", None), *doctor.check_output(state, state / "superlink.db")]
    for folder, name in ((keys, "public/ca.crt"), (keys / "public", "ca.crt")):
        (found,) = doctor.check_data(folder, required=True)
        assert found == doctor.fault(f"{folder}: a folder of keys, with {name}. Name the folder of the data.")


def test_doctor_asks_about_the_folder_of_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "server.key").touch()
    monkeypatch.setattr(doctor, "check_versions", lambda **_: iter(()))
    assert doctor.main(["--output", str(tmp_path)]) == 1
    assert f"FAULT  {tmp_path}: a folder of keys, with server.key" in capsys.readouterr().out


def test_versions(monkeypatch):
    real = metadata.version
    asked = ["numpy>=1", "torch==0.1", "no-such-thing-here>=2", "wandb>=9; extra == 'wandb'"]
    monkeypatch.setattr(metadata, "requires", lambda name: asked)
    python, numpy, torch, missing = doctor.check_versions()
    assert (python.kind, numpy.kind, torch.kind, missing.kind) == ("ok", "ok", "FAULT", "FAULT")
    assert f"torch {real('torch')}: ==0.1 is needed" in torch.text
    assert kinds(doctor.check_versions(unneeded=["no-such-thing-here"])) == ["ok", "ok", "FAULT"]


def test_not_installed():
    assert kinds(doctor.check_versions("no-such-thing-here")) == ["ok", "FAULT"]


def test_a_gpu_that_is_asked_for_and_is_not_there(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert kinds(doctor.check_gpu(required=False)) == ["note"]
    assert kinds(doctor.check_gpu(required=True)) == ["FAULT"]
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/bin/{name}")
    assert kinds(doctor.check_gpu(required=False)) == ["FAULT"]


def test_without_a_sign_of_a_gpu_torch_is_not_imported(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor, "GPU_SIGNS", ("/dev/not-there",))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert kinds(doctor.check_gpu(required=False)) == ["note"]
    for sign, required in (("/dev/null", False), ("/dev/not-there", True)):
        monkeypatch.setattr(doctor, "GPU_SIGNS", (sign,))
        with pytest.raises(ImportError):
            next(iter(doctor.check_gpu(required=required)))


def test_the_exit_code_tells(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_versions", lambda **_: iter([doctor.ok("all")]))
    monkeypatch.setattr(doctor, "check_gpu", lambda required: iter(()))
    monkeypatch.setattr(doctor, "check_disk", lambda folder: iter([doctor.ok("room")]))
    assert doctor.main([]) == 0
    assert doctor.main(["--data", str(tmp_path / "none")]) == 1
    assert "FAULT" in capsys.readouterr().out
    with pytest.raises(SystemExit) as wrong:
        doctor.main(["--connect", "nowhere"])
    assert wrong.value.code == 2


def test_the_variable_is_read_and_an_empty_one_names_nothing(tmp_path, monkeypatch, capsys):
    for value, code in ((str(tmp_path / "none"), 1), (str(tmp_path), 0), ("", 0)):
        monkeypatch.setenv("FEDCROSS_DATA", value)
        monkeypatch.setattr(doctor, "check_versions", lambda **_: iter(()))
        assert doctor.main(["--output", str(tmp_path)]) == code, capsys.readouterr().out


def test_what_this_user_may_not_look_at_is_a_fault_and_the_rest_is_checked(tmp_path, monkeypatch, capsys):
    closed, stat = tmp_path / "closed", Path.stat

    def hidden(path, **how):
        if closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", hidden)
    monkeypatch.setattr(doctor, "check_versions", lambda **_: iter(()))
    arguments = ["--output", str(tmp_path), "--data", str(closed / "data"), "--keys", str(closed / "keys"), "--listen"]
    assert doctor.main([*arguments, "0"]) == 1
    told = capsys.readouterr().out
    for name in ("data", "keys"):
        assert f"FAULT  {closed / name}: Permission denied, user {os.getuid()} has no right to it." in told
    assert "port 0 is free" in told


def test_an_address_of_ipv6_in_brackets_is_one():
    with contextlib.closing(socket.socket(socket.AF_INET6)) as server:
        try:
            server.bind(("::1", 0))
        except OSError:
            pytest.skip("no IPv6 here")
        server.listen()
        port = server.getsockname()[1]
        for host in ("[::1]", "::1"):
            assert doctor.check_connect(f"{host}:{port}").kind == "ok"
