"""Options out of range are told before any work starts, and Ctrl-C in a subcommand ends it in a line."""

import argparse
from types import SimpleNamespace

import pytest

from fedcross.server.commands import doctor, main, options
from fedcross.server.commands.audit import devices


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (options.share, ["0.5"], ["0", "1", "nan", "-0.1", "inf"]),
        (options.not_negative, ["0", "2.5"], ["-1", "nan", "inf"]),
        (options.positive, ["0.1", "7"], ["0", "-1", "nan", "inf"]),
    ],
)
def test_numbers_out_of_range_are_refused(kind, good, bad):
    assert [kind(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not"):
            kind(text)


@pytest.mark.parametrize(
    "line",
    ["onboard r --tolerance nan", "onboard r --target 2", "landscape r --radius nan", "record --limit-mb -1",
     "record verify n --tolerance nan", "doctor --connect fl..example:80"],
)  # fmt: skip
def test_commands_refuse_them_at_once(line, capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(line.split())
    assert stop.value.code == 2
    assert "argument --" in capsys.readouterr().err


def test_an_address_that_can_be_no_hosts_is_refused_where_a_bundle_is_made(tmp_path, capsys):
    authority = tmp_path / "ca.crt"
    line = ["deploy", "new-client", "--superlink", "fl..example:8443", "--partition", "0", "--partitions", "2"]
    assert main.main([*line, str(authority), str(tmp_path / "devices"), "porch"]) != 0
    assert "'fl..example' can be no host's name" in capsys.readouterr().err
    assert doctor._address("[::1]:80") == "[::1]:80"


def test_ctrl_c_in_a_subcommand_is_a_line_and_130(monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "import_module", lambda _: SimpleNamespace(main=stop))
    assert main.main(["onboard", "run"]) == 130
    assert capsys.readouterr().err == "fedcross onboard: interrupted\n"


def test_a_line_of_the_audit_trail_without_a_slot_is_counted_all_the_same():
    [device] = devices([{"client": 1, "node": 2, "key": "k", "verdict": "accepted", "round": 3}])
    assert (device.slots, device.rounds, device.verdicts["accepted"]) == (set(), {3}, 1)
