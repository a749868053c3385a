"""The settings of the manifests: the variables of the compose file as compose reads them, and sizes of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedcross.core.errors import ConfigError
from fedcross.deploy.kubernetes.plan import quantity, read_settings


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('"task=digits rounds=3"', "task=digits rounds=3"),
        ("'task=digits rounds=3'  # short", "task=digits rounds=3"),
        (r'"x=\"a b\""', 'x="a b"'),
        ("rounds=3 x='a b'", "rounds=3 x='a b'"),
        ("rounds=3 # short", "rounds=3"),
        ("x=a#b", "x=a#b"),
        ("'x=a #b'", "x=a #b"),
    ],
)
def test_a_value_is_what_compose_reads(line: str, value: str, tmp_path: Path) -> None:
    (tmp_path / "env").write_text(f"FEDCROSS_RUN={line}\nOTHER='of two\nlines'\n")
    assert read_settings(tmp_path / "env", {})["FEDCROSS_RUN"] == value


def test_a_file_that_cannot_be_read_is_an_error_in_words(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "open").write_text("FEDCROSS_RUN='rounds=3\n")
    for name, said in (("bytes", "not UTF-8"), ("open", "closing quote on the same line")):
        with pytest.raises(ConfigError, match=said):
            read_settings(tmp_path / name, {})


@pytest.mark.parametrize(
    ("docker", "cluster"), [("3g", "3Gi"), ("512m", "512Mi"), ("1048576", "1048576"), ("2GB", "2Gi")]
)
def test_memory_is_not_taken_for_thousandths(docker: str, cluster: str) -> None:
    assert quantity(docker) == cluster


def test_an_unknown_size_is_refused() -> None:
    for wrong in ("3Gi", "", "-1", "1.5g"):
        with pytest.raises(ConfigError, match="for example 3g"):
            quantity(wrong)
