"""Which programs ``fedcross deploy federation`` asks to start again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import subcommand

deploy = subcommand("deploy")
ENDS = ". A run that is on ends with the SuperExec: resume it afterwards (fedcross deploy resume RUN)\n"


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (
            ["server/gateway.token"],
            "Restart the SuperLink and the gateway together: server/gateway.token is new, and who has the old one is "
            "refused\n",
        ),
        (
            ["operator/token"],
            "Restart the SuperLink and the SuperExec together: operator/token is new, and who has the old one is "
            "refused" + ENDS,
        ),
        (
            ["superexec/superexec.key", "server/gateway.token"],
            "Restart the SuperLink, the gateway and the SuperExec together: server/gateway.token, "
            "superexec/superexec.key are new, and who has the old one is refused" + ENDS,
        ),
        (["server/server.key"], "Restart the SuperLink and the gateway: server/server.key is new\n"),
        (["porch/superexec.key"], "Restart device porch: porch/superexec.key is new\n"),
        (
            ["page/token"],
            "page/token is new: a run that is on takes the old one until it ends. To end that now: fedcross deploy "
            "stop RUN, then fedcross deploy resume RUN\n",
        ),
        (["public/ca.crt"], ""),
        ([], ""),
    ],
)
def test_who_reads_what_is_new_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: list[str], said: str
) -> None:
    root = tmp_path / "keys"
    assert deploy(["federation", str(root), "--device", "porch"]) == 0
    assert capsys.readouterr().err == ""  # nothing runs yet
    for name in lost:
        (root / name).unlink()
    assert deploy(["federation", str(root), "--device", "porch"]) == 0
    assert capsys.readouterr().err == said


def test_a_rotated_certificate_of_the_server_is_told_and_a_first_one_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert deploy(["authority", str(tmp_path / "ca")]) == 0
    command = ["server", str(tmp_path / "ca"), str(tmp_path / "server"), "a.org"]
    assert deploy(command) == 0
    assert capsys.readouterr().err == ""
    assert deploy(command) == 0
    key = tmp_path / "server" / "server.key"
    assert capsys.readouterr().err == f"Restart the SuperLink and the gateway: {key} is new\n"
