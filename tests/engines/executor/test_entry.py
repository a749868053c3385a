"""Whose calls the SuperLink reads: headers alone decide, before a byte of the body."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from flwr.common.logger import FLOWER_LOGGER
from flwr.proto.runtime_pb2 import AcquireTaskRequest
from flwr.supercore import constant
from flwr.supercore.auth.superexec import create_superexec_auth_metadata, derive_auth_secret
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.supercore.routers.runtime.router import router as runtime
from flwr.superlink.main import create_app
from flwr.superlink.routers.control.router import router as control

from fedcross.engines.executor import entry
from fedcross.engines.executor.entry import ACQUIRE, FLEET, GATEWAY, NO_TASK, NOT_THE_GATEWAY, RUNTIME, Entry, Tasks
from fedcross.engines.executor.operators import ANOTHER, CONTROL, HEADER, SHORTEST, WHY

TOKEN, GATE, SECRET = "t" * SHORTEST, "g" * SHORTEST, b"s" * 32
TASK = "0123456789abcdef" * 16
CALL, PULL, PUSH = f"{CONTROL}list-runs", f"{FLEET}pull-messages", f"{RUNTIME}push-object"
OPERATOR, GATEWAYS = (HEADER, TOKEN), (GATEWAY, GATE)


class State:
    """Stands for Flower's state: it knows some tasks, and counts how often it is asked."""

    def __init__(self, *tokens: str) -> None:
        self.tokens, self.asked = tokens, 0

    def get_task_by_token(self, token: str) -> str | None:
        """Return something for a task that is under way."""
        self.asked += 1
        return token if token in self.tokens else None


class Flower:
    """Stands for Flower's application: answers every call, says from where, and sets the scope's app as Starlette."""

    def __init__(self, state: State, secret: bytes | None = SECRET) -> None:
        self.state = SimpleNamespace(
            superexec_auth_secret=secret, runtime_state_factory=SimpleNamespace(state=lambda: state)
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = str(scope["client"]).encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def never_read() -> Any:
    """Return a body that nobody may read."""

    async def read() -> Any:
        raise AssertionError("the body was read")
        yield b""  # an asynchronous generator

    return read()


def ask(
    path: str, *headers: tuple[str, str], flower: Flower | None = None, tasks: Tasks | None = None, gateway: str = GATE
) -> httpx.Response:
    app = flower or Flower(State(TASK))

    async def asked() -> httpx.Response:
        async def served(scope: Any, receive: Any, send: Any) -> None:
            scope["app"] = app
            await Entry(app, TOKEN, gateway, tasks or Tasks())(scope, receive, send)

        transport = httpx.ASGITransport(served, client=("192.0.2.9", 1))
        async with httpx.AsyncClient(transport=transport, base_url="https://superlink") as client:
            return await client.post(path, headers=[("content-length", "0"), *headers], content=never_read())

    return asyncio.run(asked())


def superexec(at: float | None = None, secret: bytes = SECRET, **changed: str) -> list[tuple[str, str]]:
    """Return the headers of a question for the next task; `changed` names headers by their constants."""
    found = create_superexec_auth_metadata(
        auth_secret=derive_auth_secret(secret), method=entry.SIGNED_AS, request=AcquireTaskRequest()
    )
    if at is not None:
        when = str(int(at))
        found[constant.SUPEREXEC_AUTH_TIMESTAMP_HEADER] = when
        found[constant.SUPEREXEC_AUTH_SIGNATURE_HEADER] = entry.signing.compute_superexec_signature(
            auth_secret=derive_auth_secret(secret),
            method=entry.SIGNED_AS,
            timestamp=int(at),
            nonce=found[constant.SUPEREXEC_AUTH_NONCE_HEADER],
            body_sha256=found[constant.SUPEREXEC_AUTH_BODY_SHA256_HEADER],
        )
    return [*{**found, **{getattr(constant, name): value for name, value in changed.items()}}.items()]


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(HEADER, "")],
        [(HEADER, TOKEN[1:])],
        [(HEADER, f"{TOKEN}t")],
        [(HEADER, TOKEN.upper())],
        [OPERATOR, OPERATOR],  # proxies and servers do not agree which of two counts
        [(HEADER, "x" * SHORTEST), OPERATOR],
        [("authorization", f"Bearer {TOKEN}")],
        [GATEWAYS],
    ],
)
def test_a_call_of_the_control_interface_without_the_token_is_refused_unread(headers: list[tuple[str, str]]) -> None:
    found = ask(CALL, *headers)
    brought = any(value for name, value in headers if name == HEADER)
    assert (found.status_code, found.text) == (401, ANOTHER if brought else WHY)
    assert found.headers["connection"] == "close"  # so the web server does not read on


def test_a_call_with_the_token_is_passed_on() -> None:
    assert ask(CALL, OPERATOR).status_code == 200
    assert ask(CALL, (HEADER.title(), TOKEN)).status_code == 200


@pytest.mark.parametrize("headers", [[], [(GATEWAY, GATE[1:])], [GATEWAYS, GATEWAYS], [OPERATOR]])
def test_a_devices_call_past_the_gateway_is_refused_unread(headers: list[tuple[str, str]]) -> None:
    found = ask(PULL, *headers)
    assert (found.status_code, found.text) == (401, NOT_THE_GATEWAY)


@pytest.mark.parametrize(
    ("said", "counts"),
    [
        (["203.0.113.5"], ("203.0.113.5", 0)),
        (["2001:db8::1"], ("2001:db8::1", 0)),
        (["203.0.113.5\r\nx" * 100], ("192.0.2.9", 1)),
        (["1.2.3.4, 203.0.113.5"], ("192.0.2.9", 1)),
        ([], ("192.0.2.9", 1)),
    ],
)
def test_only_the_gateway_names_another_address(said: list[str], counts: tuple[str, int]) -> None:
    forwarded = [("x-forwarded-for", one) for one in said]
    assert ask(PULL, GATEWAYS, *forwarded).text == str(counts)
    assert ask(CALL, OPERATOR, *forwarded).text == "('192.0.2.9', 1)"
    assert ask(PULL, *forwarded, gateway="").text == "('192.0.2.9', 1)"  # without a gateway: Uvicorn's own rule


def test_without_a_gateways_token_devices_come_as_they_are() -> None:
    assert ask(PULL, gateway="").status_code == 200


def test_a_programs_call_brings_the_token_of_a_task_under_way() -> None:
    assert ask(PUSH, (TASK_TOKEN_HEADER, TASK)).status_code == 200
    for headers in (
        [],
        [(TASK_TOKEN_HEADER, TASK[1:])],
        [(TASK_TOKEN_HEADER, "f" * 256)],
        [(TASK_TOKEN_HEADER, TASK), (TASK_TOKEN_HEADER, TASK)],
        [("authorization", f"Bearer {TASK}")],
        [OPERATOR, GATEWAYS],
    ):
        found = ask(PUSH, *headers)
        assert (found.status_code, found.text) == (401, NO_TASK), headers


def test_the_interface_for_models_has_its_token_elsewhere() -> None:
    path = f"{RUNTIME}responses"
    assert ask(path, ("authorization", f"Bearer {TASK}")).status_code == 200
    for said in ("", "Bearer", f"Basic {TASK}", f"Bearer {'f' * 256}"):
        assert ask(path, ("authorization", said)).status_code == 401
    assert ask(path, (TASK_TOKEN_HEADER, TASK)).status_code == 401


def test_a_token_is_looked_up_once_and_one_that_was_given_out_never() -> None:
    state, tasks = State(TASK), Tasks()
    for _ in range(3):
        assert ask(PUSH, (TASK_TOKEN_HEADER, TASK), flower=Flower(state), tasks=tasks).status_code == 200
    assert state.asked == 1
    given = "e" * 256
    tasks.given(lambda request, state: SimpleNamespace(token=given))(None, state)
    tasks.given(lambda request, state: SimpleNamespace(token=""))(None, state)
    assert ask(PUSH, (TASK_TOKEN_HEADER, given), flower=Flower(state), tasks=tasks).status_code == 200
    assert state.asked == 1


def test_what_cannot_be_a_token_costs_the_database_nothing() -> None:
    state = State()
    for said in ("", "f" * 255, "f" * 257, "'" * 256, "f " * 128):
        assert ask(PUSH, (TASK_TOKEN_HEADER, said), flower=Flower(state)).status_code == 401
    assert state.asked == 0


def test_many_wrong_tokens_at_once_ask_the_database_a_few_at_a_time() -> None:
    async def tried() -> list[bool | int]:
        tasks, go = Tasks(), asyncio.Event()
        loop = asyncio.get_running_loop()

        class Slow(State):
            def get_task_by_token(self, token: str) -> str | None:
                asyncio.run_coroutine_threadsafe(go.wait(), loop).result(30)
                return super().get_task_by_token(token)

        slow = Slow()

        async def one(number: int) -> bool | int:
            try:
                return await tasks.know(f"{number:0256d}", lambda: slow)
            except entry.RefusedError as refused:
                return refused.status

        calls = [asyncio.create_task(one(number)) for number in range(20)]
        while sum(call.done() for call in calls) < 20 - entry.LOOKUPS:
            await asyncio.sleep(0)
        go.set()
        return list(await asyncio.gather(*calls))

    found = asyncio.run(tried())
    assert sorted(found) == [False] * entry.LOOKUPS + [503] * (20 - entry.LOOKUPS)


def test_few_tokens_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "REMEMBERED", 2)
    state, tasks = State(), Tasks()
    for number in range(3):
        tasks.add(f"{number:0256d}")
    known = [asyncio.run(tasks.know(f"{number:0256d}", lambda: state)) for number in range(3)]
    assert known == [False, True, True]


def test_the_superexec_signs_its_question() -> None:
    assert ask(ACQUIRE, *superexec()).status_code == 200
    assert (
        ask(ACQUIRE, *superexec(secret=b"x" * 32), flower=Flower(State(), None)).status_code == 200
    )  # Flower's check off


@pytest.mark.parametrize(
    "headers",
    [
        [],
        superexec(secret=b"x" * 32),
        superexec(SUPEREXEC_AUTH_NONCE_HEADER="0" * 32),
        superexec(SUPEREXEC_AUTH_BODY_SHA256_HEADER="0" * 64),
        superexec(SUPEREXEC_AUTH_TIMESTAMP_HEADER="soon"),
        superexec(SUPEREXEC_AUTH_TIMESTAMP_HEADER="9" * 400),  # no float
        superexec(SUPEREXEC_AUTH_TIMESTAMP_HEADER="9" * 5000),  # no int of Python's
        superexec(SUPEREXEC_AUTH_SIGNATURE_HEADER=""),
        superexec(at=1_600_000_000),
        [*superexec(), superexec()[0]],
        [(TASK_TOKEN_HEADER, TASK)],
        [OPERATOR],
    ],
)
def test_a_question_for_the_next_task_that_is_not_the_superexecs_is_refused(headers: list[tuple[str, str]]) -> None:
    assert ask(ACQUIRE, *headers).status_code == 401


@pytest.mark.parametrize(
    ("length", "good"),
    [("0", True), ("65536", True), ("65537", False), ("-1", False), ("9" * 5000, False), ("", False)],
)
def test_its_body_is_small(length: str, good: bool) -> None:
    headers = [(k.encode(), v.encode()) for k, v in superexec()]
    lengths = [(b"content-length", length.encode())] if length else [(b"transfer-encoding", b"chunked")]
    assert entry.signed(headers + lengths, SECRET, time.time()) is good


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/health", [], 200),
        ("/health", [("content-length", "00")], 200),
        ("/health", [("content-length", "1073741824")], 404),
        ("/health", [("transfer-encoding", "chunked")], 404),
        ("/docs", [], 404),
        ("/openapi.json", [OPERATOR], 404),
        ("/v1/controls", [], 404),
        ("/", [], 404),
    ],
)
def test_of_other_paths_there_is_the_health_alone(path: str, headers: list[tuple[str, str]], status: int) -> None:
    assert ask(path, *headers).status_code == status


def test_all_calls_of_the_two_interfaces_are_covered() -> None:
    """As Flower routes them today; and every program's call is authenticated by Flower as this entry expects it."""
    paths = [route.path for route in control.routes if isinstance(route, APIRoute)]
    assert len(paths) > 20
    assert all(path.startswith(CONTROL) for path in paths)
    for route in runtime.routes:
        assert isinstance(route, APIRoute)
        assert route.path.startswith(RUNTIME)
        needs = {type(one.call).__name__ for one in route.dependant.dependencies}
        needs |= {getattr(one.call, "__name__", "") for one in route.dependant.dependencies}
        asks_for_a_task = any("task" in name for name in needs)
        assert asks_for_a_task or (route.path == ACQUIRE and "SuperExecAuthDependency" in needs), (route.path, needs)


@pytest.mark.parametrize(
    "path", ["/v1//control/list-runs", "//v1/control/list-runs", "/V1/control/list-runs", "/v1/x/../control/list-runs"]
)
def test_no_other_spelling_of_a_path_reaches_it(path: str) -> None:
    async def asked(one: str) -> int:
        transport = httpx.ASGITransport(Entry(create_app(None), TOKEN, "", Tasks()))
        async with httpx.AsyncClient(transport=transport, base_url="https://superlink") as client:
            return (await client.post(one)).status_code

    assert asyncio.run(asked(path)) == 404 or path.startswith("/v1/")
    assert asyncio.run(asked(path)) in {401, 404}
    assert asyncio.run(asked("/v1/%63ontrol/list-runs")) == 401


def test_refused_calls_are_told_once_a_minute(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FLOWER_LOGGER, "propagate", True)
    now = [0.0]
    app = Entry(Flower(State()), TOKEN, GATE, Tasks(), clock=lambda: now[0])

    async def sent(message: Any) -> None:
        pass

    async def call() -> None:
        await app({"type": "http", "path": CALL, "headers": [], "client": ("192.0.2.9", 1)}, None, sent)  # type: ignore[arg-type]

    with caplog.at_level(logging.WARNING):
        for seconds in (0, 1, 30, 61):
            now[0] = seconds
            asyncio.run(call())
    told = [record.getMessage() for record in caplog.records]
    assert told == [f"fedcross: {count} calls refused unread, the last from 192.0.2.9: {WHY}" for count in (1, 3)]


def test_the_first_middleware_of_flowers_application() -> None:
    tasks = Tasks()
    found = entry.before(lambda: (SimpleNamespace(cls="next"),), TOKEN, GATE, tasks)()  # type: ignore[arg-type, return-value]
    assert [one.cls for one in found] == [Entry, "next"]
    assert found[0].kwargs == {"operator": TOKEN, "gateway": GATE, "tasks": tasks}


def test_other_events_of_the_server_pass() -> None:
    seen: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    asyncio.run(Entry(app, TOKEN, GATE, Tasks())({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert seen == ["lifespan"]
