"""Types of command-line options, and what ends a subcommand."""

import argparse
from types import SimpleNamespace

import pytest

from fedcross.server.commands import main
from fedcross.server.commands.options import not_negative, positive, share


@pytest.mark.parametrize(
    ("kind", "wrong"), [(share, "2"), (share, "0"), (not_negative, "-1"), (not_negative, "nan"), (positive, "0")]
)
def test_values_out_of_range(kind, wrong):
    with pytest.raises(argparse.ArgumentTypeError, match=wrong):
        kind(wrong)


def test_values_in_range():
    assert (share("0.5"), not_negative("0"), positive("2")) == (0.5, 0.0, 2.0)


def test_ctrl_c_in_a_subcommand_is_a_line(monkeypatch, capsys):
    def stop(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "import_module", lambda _: SimpleNamespace(main=stop))
    assert main.main(["analyse", "run"]) == 130
    assert capsys.readouterr().err == "fedcross analyse: interrupted\n"
