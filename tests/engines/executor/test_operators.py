"""Who may call the SuperLink's control interface: whoever has the operator's token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.superlink.main import create_app
from flwr.superlink.routers.control.router import router

from fedcross.engines.executor import operators
from fedcross.engines.executor.operators import CONTROL, HEADER, SHORTEST, VARIABLE, WHY, Operators

TOKEN = "t" * SHORTEST
CALL = f"{CONTROL}list-runs"


async def flower(scope: Any, receive: Any, send: Any) -> None:
    """Stand for Flower's application, which answers every call."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"flower"})


def ask(path: str, *headers: tuple[str, str], app: Any = flower) -> httpx.Response:
    async def asked() -> httpx.Response:
        transport = httpx.ASGITransport(Operators(app, TOKEN))
        async with httpx.AsyncClient(transport=transport, base_url="https://superlink") as client:
            return await client.post(path, headers=list(headers))

    return asyncio.run(asked())


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(HEADER, "")],
        [(HEADER, TOKEN[1:])],
        [(HEADER, f"{TOKEN}t")],
        [(HEADER, TOKEN.upper())],
        [(HEADER, TOKEN), (HEADER, TOKEN)],  # proxies and servers do not agree which of two counts
        [(HEADER, "x" * SHORTEST), (HEADER, TOKEN)],
        [("authorization", f"Bearer {TOKEN}")],
    ],
)
def test_a_call_without_the_token_is_refused_and_reaches_nobody(headers: list[tuple[str, str]]) -> None:
    found = ask(CALL, *headers)
    assert (found.status_code, found.text) == (401, WHY)
    assert found.headers["connection"] == "close"  # the body of the call is not read


def test_a_call_with_the_token_is_passed_on() -> None:
    assert ask(CALL, (HEADER, TOKEN)).text == "flower"
    assert ask(CALL, (HEADER.title(), TOKEN)).text == "flower"


@pytest.mark.parametrize("path", ["/health", "/v1/fleet/pull-messages", "/v1/runtime/pull-messages", "/v1/controls"])
def test_devices_and_programs_of_a_run_need_no_such_token(path: str) -> None:
    assert ask(path).text == "flower"


def test_all_calls_of_the_control_interface_are_covered() -> None:
    """As Flower routes them today."""
    paths = [route.path for route in router.routes]
    assert len(paths) > 20
    assert all(path.startswith(CONTROL) for path in paths)


@pytest.mark.parametrize(
    "path", ["/v1//control/list-runs", "//v1/control/list-runs", "/V1/control/list-runs", "/v1/x/../control/list-runs"]
)
def test_no_other_spelling_of_a_path_reaches_it(path: str) -> None:
    app = create_app(None)
    assert ask(path, app=app).status_code in {401, 404}
    assert ask("/v1/%63ontrol/list-runs", app=app).status_code == 401


def test_the_first_middleware_of_flowers_application() -> None:
    found = operators.before(lambda: (SimpleNamespace(cls="next"),), TOKEN)()  # type: ignore[arg-type, return-value]
    assert [one.cls for one in found] == [Operators, "next"]
    assert found[0].kwargs == {"token": TOKEN}


def test_other_events_of_the_server_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(Operators(app, TOKEN)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]


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
