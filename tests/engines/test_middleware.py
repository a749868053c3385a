from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import pytest
from google.protobuf import descriptor_pool, message_factory

from fedcross.engines import flower_private, middleware
from fedcross.engines.middleware import ANNOUNCE, PULL, Guard, RefusedError, Trees

TOKEN = "t" * 40
PUSHES = "/v1/runtime/push-messages"


@pytest.fixture(autouse=True)
def messages() -> None:
    """Load Flower's protocol, as the SuperLink does."""
    assert flower_private.create_app


def name(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def announcement(children: dict[str, list[str]], root: str = "root", copies: int = 1) -> bytes:
    """Return the body of an announced reply with the tree below `root`: name -> names of its children."""
    kind = message_factory.GetMessageClass(descriptor_pool.Default().FindMessageTypeByName(middleware.REQUEST))
    request: Any = kind()

    def fill(node: Any, which: str, depth: int) -> None:
        node.object_id = name(which)
        for child in children.get(which, []) if depth else []:
            fill(node.children.add(), child, depth - 1)

    for _ in range(copies):
        request.messages_list.add().metadata.message_id = name(root)
        fill(request.message_object_trees.add(), root, 7)
    body: bytes = request.SerializeToString()
    return body


GOOD = {"root": ["dict"], "dict": ["arrays", "metrics"], "arrays": ["a", "b"], "a": ["c1", "c2"], "b": ["c2"]}


def test_a_reply_is_let_through_also_again_and_with_shared_chunks() -> None:
    trees = Trees()
    trees.check(announcement(GOOD))
    trees.check(announcement(GOOD))


BAD = [
    ({"root": ["1"], "1": ["2"], "2": ["3"], "3": ["4"], "4": ["5"]}, "deep"),
    ({"root": ["a", "b"], "a": ["b"], "b": ["c"], "c": []}, ""),
    ({"root": ["a", "a"]}, "twice"),
]


@pytest.mark.parametrize(("tree", "why"), BAD[::2])
def test_trees_that_no_reply_has(tree: dict[str, list[str]], why: str) -> None:
    with pytest.raises(RefusedError) as caught:
        Trees().check(announcement(tree))
    assert why in caught.value.why


def test_a_name_has_one_set_of_children_in_a_tree_and_between_trees() -> None:
    trees = Trees()
    trees.check(announcement(GOOD))
    with pytest.raises(RefusedError):  # a chunk gets children: shared again and again, they would double each time
        trees.check(announcement({"other": ["c1"], "c1": ["x", "y"]}, "other"))
    with pytest.raises(RefusedError):  # an object that has children is announced as a leaf, below another one
        trees.check(announcement({"third": ["a1"], "a1": ["a2"], "a2": ["a3"], "a3": ["dict"]}, "third"))
    body = bytearray(announcement({"r": ["x", "y"], "x": ["y"], "y": ["z"]}, "r"))
    trees.check(bytes(body))


def test_a_tree_of_too_many_objects_and_what_is_no_announcement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "OBJECTS", 7)
    with pytest.raises(RefusedError) as caught:
        Trees().check(announcement(GOOD))
    assert caught.value.status == 413
    for body in (b"\xff\xff", b"", announcement({"root": ["a"]}, copies=2)):
        with pytest.raises(RefusedError) as caught:
            Trees().check(body)
        assert caught.value.status == 400


def test_a_protocol_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "REQUEST", "flwr.proto.PullMessagesRequest")
    with pytest.raises(RuntimeError):
        Trees()


class Flower:
    """An application that answers 200 with `answers`, one after the other; it reads each body."""

    def __init__(self, *answers: bytes) -> None:
        self.answers, self.calls = list(answers), []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        self.calls.append((scope["path"], body))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.answers.pop(0) if self.answers else b""})


class Call:
    """One call of `guard`; :meth:`cut` closes its connection."""

    def __init__(self, guard: Guard, path: str, body: bytes = b"", token: str = "") -> None:
        self._guard, self._body = guard, body
        headers = [(middleware.HEADER.encode(), token.encode())] if token else []
        self._scope = {"type": "http", "path": path, "headers": headers, "client": ("127.0.0.1", 1)}
        self._cut, self._read, self.sent = asyncio.Event(), False, []

    def cut(self) -> None:
        self._cut.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._read:
            self._read = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._cut.wait()
        return {"type": "http.disconnect"}

    async def _send(self, event: Any) -> None:
        self.sent.append(event)

    async def run(self) -> tuple[int, bytes]:
        await self._guard(self._scope, self._receive, self._send)
        if not self.sent:
            return 0, b""
        return self.sent[0]["status"], b"".join(event.get("body", b"") for event in self.sent[1:])


def call(flower: Flower, path: str, body: bytes = b"", token: str = "") -> int:
    async def once() -> int:
        return (await Call(Guard(flower, TOKEN), path, body, token).run())[0]

    return asyncio.run(once())


PATHS = [
    ("/v1/control/start-run", "", 401), ("/v1/control/start-run", TOKEN[1:], 401),
    ("/v1/control/start-run", TOKEN, 200),
    ("/v1/fleet/get-run", "", 200), ("/v1/fleet/new-call", "", 404), ("/v2/control/start-run", TOKEN, 404),
    ("/v1/runtime/acquire-task", "", 200), ("/health", "", 200), ("/docs", "", 404), ("/v1/control", "", 404),
]  # fmt: skip


@pytest.mark.parametrize(("path", "token", "status"), PATHS)
def test_paths(path: str, token: str, status: int) -> None:
    flower = Flower()
    assert call(flower, path, token=token) == status
    assert len(flower.calls) == (status == 200)


def test_an_announcement_reaches_flower_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    flower, body = Flower(), announcement(GOOD)
    assert call(flower, ANNOUNCE, body) == 200
    assert flower.calls == [(ANNOUNCE, body)]
    assert call(flower, ANNOUNCE, announcement(BAD[0][0])) == 400
    monkeypatch.setattr(middleware, "ANNOUNCED", len(body) - 1)
    assert call(flower, ANNOUNCE, body) == 413
    assert len(flower.calls) == 1


def test_the_limit_is_that_of_all_parts_of_a_body() -> None:
    """Three parts of 4 bytes are 12: allowed are 12, not 11."""

    def read(most: int) -> bytes:
        parts = [b"abcd", b"efgh", b"ijkl"]

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        return asyncio.run(middleware._body(receive, most))

    assert read(12) == b"abcdefghijkl"
    with pytest.raises(RefusedError) as caught:
        read(11)
    assert caught.value.status == 413


def test_a_device_without_work_hears_when_the_server_has_sent_something(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "HOLD_S", 600)

    async def play() -> None:
        flower = Flower(b"", b"sent", b"message")
        guard = Guard(flower, TOKEN)
        waiting = asyncio.ensure_future(Call(guard, PULL, b"signed").run())
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await Call(guard, PUSHES).run()
        assert await asyncio.wait_for(waiting, 60) == (200, b"message")
        assert [one for one in flower.calls if one[0] == PULL] == [(PULL, b"signed")] * 2

    asyncio.run(play())


def test_waiting_has_an_end_and_a_device_that_is_gone_takes_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    async def play() -> None:
        flower = Flower(b"", b"", b"", b"sent", b"for somebody else")
        guard = Guard(flower, TOKEN)
        monkeypatch.setattr(middleware, "HOLD_S", 0.05)
        assert await Call(guard, PULL).run() == (200, b"")
        monkeypatch.setattr(middleware, "HOLD_S", 600)
        held = Call(guard, PULL)
        waiting = asyncio.ensure_future(held.run())
        await asyncio.sleep(0.05)
        held.cut()
        assert await asyncio.wait_for(waiting, 60) == (0, b"")
        await Call(guard, PUSHES).run()
        assert flower.answers == [b"for somebody else"]

    asyncio.run(play())
