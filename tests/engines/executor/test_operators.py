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


def test_the_token_is_read_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert operators.token({VARIABLE: str(file)}) == TOKEN
    assert operators.token({}) == operators.token({VARIABLE: ""}) == ""
    (brings,) = operators.bringing({VARIABLE: str(file)})
    context = SimpleNamespace(request=SimpleNamespace(headers={}))
    assert brings.intercept(context, lambda called: (called, "answer")) == (context, "answer")
    assert context.request.headers == {HEADER: TOKEN}
    assert operators.bringing({}) == []


@pytest.mark.parametrize("content", [b"", b"short", b"t" * (SHORTEST - 1) + b"\n", b"\xff" * 40, b"t" * 40 + b"\nt"])
def test_a_file_without_a_token_is_an_error_that_does_not_say_what_is_in_it(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"{VARIABLE}={file}: ") as caught:
        operators.token({VARIABLE: str(file)})
    assert "tttt" not in str(caught.value)
    assert "short" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        operators.token({VARIABLE: str(tmp_path / "none")})


def test_flowers_own_command_line_brings_the_token_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
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
