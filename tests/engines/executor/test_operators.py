"""The operator's token: who has it, and who brings it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

from fedcross.engines.executor import operators
from fedcross.engines.executor.operators import HEADER, SHORTEST, VARIABLE

TOKEN = "t" * SHORTEST


def private(file: Path, content: bytes) -> Path:
    file.touch(mode=0o600)
    file.write_bytes(content)
    return file


def test_the_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = private(tmp_path / "token", f"{TOKEN}\n".encode())
    assert operators.token({VARIABLE: str(file)}) == TOKEN
    assert operators.token({}) == operators.token({VARIABLE: ""}) == ""
    (brings,) = operators.bringing({VARIABLE: str(file)})
    context = SimpleNamespace(request=SimpleNamespace(headers={}))
    assert brings.intercept(context, lambda called: (called, "answer")) == (context, "answer")
    assert context.request.headers == {HEADER: TOKEN}
    assert operators.bringing({}) == []


@pytest.mark.parametrize("content", [b"", b"short", b"t" * (SHORTEST - 1) + b"\n", b"\xff" * 40, b"t" * 40 + b"\nt"])
def test_a_file_without_a_token_is_an_error_that_does_not_say_what_is_in_it(tmp_path: Path, content: bytes) -> None:
    file = private(tmp_path / "token", content)
    with pytest.raises(ValueError, match=f"{VARIABLE}={file}: ") as caught:
        operators.token({VARIABLE: str(file)})
    assert "tttt" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_what_a_file_is_that_is_no_token_is_said(tmp_path: Path) -> None:
    """Nothing says to remove it: it may be the authority's key."""
    for content, what in (
        (b"-----BEGIN PRIVATE KEY-----\nx", "a private key"),
        (b"-----BEGIN CERTIFICATE-----\n-----BEGIN EC PRIVATE KEY-----\n", "a private key"),
        (b"-----BEGIN CERTIFICATE-----\n", "a certificate"),
        (b"SQLite format 3\0...", "a database"),
    ):
        file = private(tmp_path / "file", content)
        file.chmod(0o644)
        with pytest.raises(ValueError, match=rf"{VARIABLE}={file}: this is {what}\. Name the operator's token in"):
            operators.token({VARIABLE: str(file)})
    with pytest.raises(ValueError, match="this is no token, it is no text"):
        operators.token({VARIABLE: str(private(tmp_path / "binary", b"\xff" * 40))})
    for folder in ("state", "operator/token"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(
        ValueError, match=r"this is a folder, not the file in it\. Name the operator's token in"
    ) as told:
        operators.token({VARIABLE: str(tmp_path / "state")})
    assert "rmdir" not in str(told.value)
    with pytest.raises(ValueError, match=r"a folder\. Name the file in it\. If it is empty, Docker .* rmdir it"):
        operators.token({VARIABLE: str(tmp_path / "operator" / "token")})


def test_a_refused_token_is_told_for_who_has_the_new_one_and_for_who_has_the_old_one() -> None:
    old, new = operators.ANOTHER.split(" If it was: ")
    assert old.endswith("made anew and the SuperLink not restarted since: restart it, until then the old one counts.")
    assert new == f"start this program again, with the new token. Else name the right file in {VARIABLE}"
    assert len(operators.ANOTHER) < 300  # what engines/remote.py and engines/runs.py show of an answer


def test_another_tokens_place_is_none_for_a_variable(tmp_path: Path) -> None:
    """The page's token stands in page.url, and would start runs."""
    for name, owner in (("page/token", "page"), ("operator/token", "operator"), ("server/gateway.token", "gateway")):
        (tmp_path / name).parent.mkdir()
        file = private(tmp_path / name, TOKEN.encode())
        assert operators.whose(file) == owner
        for variable, own in operators.FOLDERS.items():
            if own == owner:
                assert operators.token({variable: str(file)}, variable) == TOKEN
                continue
            with pytest.raises(ValueError, match=f"this is {operators.OWNERS[owner]}. Name {operators.OWNERS[own]}"):
                operators.token({variable: str(file)}, variable)
    assert operators.whose(tmp_path / "token") == ""


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        operators.token({VARIABLE: str(tmp_path / "none")})


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620])
def test_a_token_that_others_can_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = private(tmp_path / "token", TOKEN.encode())
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"{VARIABLE}={file}: mode {mode:o}, .* chmod 600 {file}"):
        operators.token({VARIABLE: str(file)})


@pytest.mark.parametrize(
    "token", [TOKEN, "short", "/" + "s" * 20, f"{'a' * 20}/{'b' * 20}=", "x" * 5000, f"{'word ' * 9}"]
)
def test_the_token_in_place_of_its_file_is_not_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, token: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"{VARIABLE}=\({len(token)} characters\).*token itself") as caught:
        operators.token({VARIABLE: token})
    assert token not in str(caught.value)
    private(tmp_path / TOKEN, TOKEN.encode())
    assert operators.token({VARIABLE: TOKEN}) == TOKEN  # a file's name, however long


def test_flowers_own_command_line_brings_the_token_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = private(tmp_path / "token", TOKEN.encode())
    monkeypatch.setenv(VARIABLE, str(file))
    # `attach` replaces it for the whole process.
    made = ControlHttpClient.from_server_address.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(ControlHttpClient, "from_server_address", classmethod(made))
    operators.attach()
    client = ControlHttpClient.from_server_address(
        server_address="127.0.0.1:1",
        insecure=True,
        root_certificates=None,
        interceptors=[RuntimeVersionHttpInterceptor(component_name="test")],
    )
    try:
        assert [type(one).__name__ for one in client._interceptors] == ["RuntimeVersionHttpInterceptor", "Brings"]
    finally:
        client.close()
