"""Who is let in at the SuperLink's door, whose call it is, and who is sent away."""

from __future__ import annotations

import asyncio
import functools
import json
from base64 import b64encode
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa, x25519
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message
from flwr.superlink import extensions

from fedcross.engines.executor import door as module
from fedcross.engines.executor import fair as fairs
from fedcross.engines.executor import lines
from fedcross.engines.executor.door import FLEET, KEY, SIGNATURE, TIME, Door, Pairs, before, network, proved
from fedcross.engines.executor.fair import FEW, MOST, Fair, current
from fedcross.engines.executor.replies import Later
from fedcross.engines.executor.share import FABS, FABS_BURST, Share, within
from fedcross.engines.executor.turns import LARGE

HOME, OTHER = "10.0.0.1", "10.0.0.2"
NODE, NEIGHBOUR = 7, 8
PRIVATE, PUBLIC = generate_key_pairs()
NAME = public_key_to_bytes(PUBLIC)
PEM = (Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
STRANGER, _ = generate_key_pairs()
WHEN = b"2026-11-23T00:00:00+00:00"


@functools.cache
def signature(private: EllipticCurvePrivateKey) -> bytes:
    return b64encode(sign_message(private, WHEN))


@functools.cache
def right(key: bytes, signature: bytes) -> bool:
    return module.signed({KEY: key, TIME: WHEN, SIGNATURE: signature})


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Flower:
    """Stands for Flower's application, which checks signatures and takes `seconds` for a call."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.seconds, self.calls = clock, 0.01, 0
        self.nodes = {NAME: NODE}
        self.share = Share(clock=clock)
        self.gate: asyncio.Event | None = None
        self.inside = self.most = 0
        self.bodies: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        self.bodies.append(len((await receive())["body"]))
        headers = dict(reversed(scope["headers"]))  # as Flower: the first of several
        self.inside += 1
        self.most = max(self.most, self.inside)
        if self.gate is not None:
            await self.gate.wait()
        self.clock.now += self.seconds
        self.inside -= 1
        status = 401
        if right(headers[KEY], headers[SIGNATURE]):
            state = SimpleNamespace(get_node_id_by_public_key=self.nodes.get)
            status = self._handle(SimpleNamespace(public_key=module.b64decode(headers[KEY])), state, scope["path"])
        await send({"type": "http.response.start", "status": status})
        await send({"type": "http.response.body", "body": b""})

    def _handle(self, request: Any, state: Any, path: str) -> int:
        if request.public_key not in self.nodes:
            return 401
        handler = proved(within(lambda request, state: 200, self.share, Share(clock=self.clock)))
        try:
            return 200 if path == FLEET + "push-object" else int(handler(request=request, state=state))
        except Later as later:
            return later.status_code
        finally:
            if path == FLEET + "push-object":
                proved(lambda request, state: 200)(request=request, state=state)


class Gate:
    """A door, and what stands behind it."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.flower = Flower(self.clock)
        self.fair = Fair(self.clock)
        self.door = Door(self.flower, self.fair)
        self.silent = 0
        self.second: bytes | None = None

    async def ask(
        self,
        path: str = "pull-messages",
        private: EllipticCurvePrivateKey = PRIVATE,
        *,
        name: bytes = NAME,
        address: str = HOME,
        body: bytes = b"",
        announced: bool = True,
    ) -> int:
        """Make a call with the public key `name`, signed with `private`; return the status."""
        return (await self.answer(path, private, name, address, body, announced))[0]["status"]

    async def answer(
        self, path: str, private: Any, name: bytes, address: str, body: bytes, announced: bool = True
    ) -> list[dict[str, Any]]:
        """Return all that is sent."""
        headers = [(KEY, b64encode(name)), (TIME, WHEN), (SIGNATURE, signature(private))]
        headers += [(KEY, self.second)] if self.second else []
        headers += [(b"content-length", str(len(body)).encode())] if announced else []
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            record = SimpleNamespace(args=())
            self.silent += message["type"].endswith("start") and not lines.access(record)  # type: ignore[arg-type]
            sent.append(message)

        scope = {"type": "http", "path": FLEET + path, "headers": headers, "client": (address, 1)}
        await asyncio.create_task(self.door(scope, receive, send))
        return sent

    async def busy(self, seconds: float = 2.0, node: int = NEIGHBOUR) -> None:
        """Let other nodes have used so many seconds lately."""
        caller = self.fair.node(node)
        self.fair.come(caller, "x").caller.here -= 1
        self.fair.charge(caller, seconds)


def run(made: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(made, 120))


def test_who_has_used_its_time_is_sent_away_from_the_headers_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.ask() == 200
        await gate.busy()
        gate.flower.gate = asyncio.Event()
        gate.fair.charge(gate.fair.node(NODE), 2.0)
        waiting = [asyncio.create_task(gate.ask()) for _ in range(FEW)]
        await asyncio.sleep(0)
        while len(gate.fair._queue) < FEW - 1:
            await asyncio.sleep(0)
        before_it = gate.flower.calls
        sent = await gate.answer("confirm-message-received", PRIVATE, NAME, HOME, b"")
        assert sent[0]["status"] == 503
        assert dict(sent[0]["headers"])[b"retry-after"] == b"5"
        assert "calls too often" in json.loads(sent[1]["body"])["detail"]
        for _ in range(100):
            assert await gate.ask("get-fab") == 503
        assert gate.flower.calls == before_it
        assert gate.silent == 101  # no lines in the web server's log
        assert caplog.text.count(f"sent away calls of node {NODE}: {FEW} of its calls are here already") == 1
        gate.flower.gate.set()
        assert [await one for one in waiting] == [200] * FEW
        assert gate.flower.most == 1  # one at a time

    run(main())


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(x25519.X25519PrivateKey.generate().public_key().public_bytes(*PEM), id="x25519"),
        pytest.param(rsa.generate_private_key(65537, 2048).public_key().public_bytes(*PEM), id="rsa"),
        pytest.param(NAME.replace(b"M", b"N", 1), id="damaged"),
        pytest.param(b"", id="none"),
    ],
)
def test_a_key_that_checks_no_signature_ends_at_the_door(name: bytes) -> None:
    """Flower answers the first with 500, and a traceback in the log."""

    async def main() -> None:
        gate = Gate()
        assert await gate.ask(name=name) == 401
        assert gate.flower.calls == 0

    run(main())


def test_a_stranger_who_names_a_key_from_elsewhere_sends_nobody_away() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.ask() == 200
        await gate.busy()
        for _ in range(200):
            assert await gate.ask(private=STRANGER, address=OTHER) == 401
        mine = gate.fair.node(NODE)
        assert mine.balance > fairs.BURST_S - 0.1
        assert gate.fair.strangers(OTHER).balance < 2.0
        calls = gate.flower.calls
        assert await gate.ask() == 200
        assert gate.flower.calls == calls + 1
        # Nor does one who holds all its calls there.
        gate.flower.gate = asyncio.Event()
        held = [asyncio.create_task(gate.ask(private=STRANGER, address=OTHER)) for _ in range(200)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert gate.flower.inside <= fairs.STRANGERS
        own = asyncio.create_task(gate.ask())
        for _ in range(10):
            await asyncio.sleep(0)
        assert mine.inside == 1
        gate.flower.gate.set()
        assert await own == 200
        assert {await one for one in held} == {401, 503}

    run(main())


@pytest.mark.slow
def test_a_neighbour_behind_one_router_with_a_wrong_signature_sends_nobody_away() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.ask() == 200
        await gate.busy()
        calls = gate.flower.calls
        for _ in range(1000):
            assert await gate.ask(private=STRANGER) == 401
        assert gate.flower.calls == calls + 1  # the door checks the others itself
        mine = gate.fair.node(NODE)
        assert mine.balance > fairs.BURST_S - 0.1
        for _ in range(20):
            assert await gate.ask() == 200
            assert await gate.ask(private=STRANGER) == 401
        assert gate.flower.calls == calls + 21
        assert not mine.sent
        gate.clock.now += module.DOUBT_S
        assert await gate.ask(private=STRANGER) == 401
        assert gate.flower.calls == calls + 22

    run(main())


def test_a_key_that_is_registered_no_more_is_a_strangers() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.ask() == 200
        gate.flower.nodes = {}
        for _ in range(3):
            assert await gate.ask() == 401
        assert not len(gate.door.pairs)
        assert gate.fair.node(NODE).here == 0

    run(main())


def test_what_is_beyond_a_nodes_share_is_sent_away_until_there_is_room() -> None:
    async def main() -> None:
        gate = Gate()
        gate.flower.share = Share(FABS, FABS_BURST, gate.clock)
        for count in range(FABS_BURST + 1):
            assert await gate.ask("get-fab") == (200 if count < FABS_BURST else 503)
        calls = gate.flower.calls
        for _ in range(100):
            assert await gate.ask("get-fab") == 503
        assert gate.flower.calls == calls
        assert await gate.ask("push-object") == 200  # other calls are let in
        gate.clock.now += 60 / FABS
        assert await gate.ask("get-fab") == 200

    run(main())


@pytest.mark.slow
def test_thousands_of_objects_of_a_node_arrive_while_others_work() -> None:
    async def main() -> None:
        gate = Gate()
        answers: list[int] = []
        assert await gate.ask() == 200
        await gate.busy()

        async def push(count: int) -> None:
            for _ in range(count):
                status = await gate.ask("push-object", body=b"x" * 4000)
                answers.append(status)

        async def time() -> None:
            while len(answers) < 4000:
                await asyncio.sleep(0)
                if gate.fair.node(NODE).balance <= 0:
                    gate.clock.now += 0.05
                    await gate.busy(0.01)
                    gate.fair.admit()  # as the event loop does

        await asyncio.gather(push(2000), push(2000), time())
        assert answers == [200] * 4000
        took = gate.flower.seconds * 4000
        assert 1.5 * took < gate.clock.now < 6 * took

    run(main())


@pytest.mark.slow
def test_alone_a_node_gets_everything() -> None:
    async def main() -> None:
        gate = Gate()
        for _ in range(4000):
            assert await gate.ask("push-object", body=b"x" * 4000) == 200
        assert gate.clock.now == pytest.approx(40.0)
        gate.flower.gate = asyncio.Event()
        held = [asyncio.create_task(gate.ask()) for _ in range(MOST)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert gate.flower.inside == fairs.PLACES
        gate.flower.gate.set()
        assert [await one for one in held] == [200] * MOST

    run(main())


def test_a_large_object_waits_elsewhere_and_a_strangers_large_body_is_not_read() -> None:
    async def main() -> None:
        gate = Gate()
        assert await gate.ask() == 200
        gate.flower.gate = asyncio.Event()
        large = [asyncio.create_task(gate.ask("push-object", body=b"x" * LARGE)) for _ in range(5)]
        small = [asyncio.create_task(gate.ask()) for _ in range(3)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert gate.flower.inside == 8
        gate.flower.gate.set()
        assert [await one for one in (*large, *small)] == [200] * 8
        gate.door._more = module.MORE  # as many are here
        calls = gate.flower.calls
        for length, announced in ((module.SMALL + 1, True), (5, False)):
            sent = await gate.ask(address=OTHER, body=b"x" * length, announced=announced)
            assert sent == 503
        assert gate.flower.calls == calls
        assert await gate.ask(address=OTHER, body=b"x" * module.SMALL) == 200
        assert await gate.ask(body=b"x" * LARGE) == 200
        assert gate.fair.strangers(OTHER).here == gate.fair._strangers_here == gate.fair._strangers == 0

    run(main())


def test_a_body_that_does_not_come_and_a_place_that_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        gate = Gate()
        monkeypatch.setattr(module, "STRANGERS_BODY_S", 0.01)
        monkeypatch.setattr(module, "QUEUE_S", 0.01)
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def never() -> Any:
            await asyncio.Event().wait()

        async def gone() -> Any:
            return {"type": "http.disconnect"}

        key = (KEY, b64encode(NAME))
        scope = {"type": "http", "path": FLEET + "get-run", "headers": [key], "client": None}
        for receive in (never, gone):
            await asyncio.create_task(gate.door(scope, receive, send))
        assert [one["status"] for one in sent if "status" in one] == [503, 503]
        gate.flower.gate = asyncio.Event()
        held = [asyncio.create_task(gate.ask(address=OTHER)) for _ in range(fairs.STRANGERS)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert await gate.ask(address=HOME) == 503
        gate.flower.gate.set()
        assert [await one for one in held] == [200] * fairs.STRANGERS
        assert await gate.ask() == 200
        assert not gate.fair._queue

    run(main())


def test_other_paths_pass_as_they_are() -> None:
    async def main() -> None:
        seen: list[Any] = []

        async def app(*given: Any) -> None:
            seen.append(given)

        door = Door(app, Fair())
        for scope in ({"type": "lifespan"}, {"type": "http", "path": "/health"}):
            await door(scope, None, None)  # type: ignore[arg-type]
            assert seen[-1] == (scope, None, None)

    run(main())


def test_an_error_of_flowers_leaves_the_place() -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            raise RuntimeError("of the application")

        gate = Gate()
        gate.door._app = app
        for _ in range(3 * fairs.PLACES):
            with pytest.raises(RuntimeError, match="of the application"):
                await gate.ask()
        assert gate.fair._inside == gate.fair._strangers_here == 0

    run(main())


def test_who_names_two_keys_or_writes_one_in_another_way_is_who_flower_thinks() -> None:
    async def main() -> None:
        gate = Gate()
        other, public = generate_key_pairs()
        gate.flower.nodes[public_key_to_bytes(public)] = NEIGHBOUR
        assert await gate.ask() == 200
        gate.second = b64encode(NAME)  # a neighbour behind the same router puts its own key before it
        for _ in range(3):
            assert await gate.ask(private=other, name=public_key_to_bytes(public)) == 200
        gate.second = None
        found = gate.door.pairs.find(NAME, HOME)
        assert found is not None
        assert (found.node, found.doubt) == (NODE, 0.0)
        assert gate.fair.node(NODE).used < 0.02 < gate.fair.node(NEIGHBOUR).used
        text = b64encode(b"k" * 10)  # its last letter has four bits that nobody reads
        same = text.replace(b"w==", b"x==")
        assert text != same
        assert module.key_in({KEY: text}) == module.key_in({KEY: same}) == b"k" * 10
        assert module.key_in({KEY: b"\xff"}) == module.key_in({}) == b""

    run(main())


def test_pairs_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADDRESSES", 3)
    monkeypatch.setattr(module, "REMEMBERED", 5)
    pairs = Pairs()
    for host in range(10):  # one device with many addresses makes nobody else unknown
        pairs.add(b"a", str(host), 1)
    assert len(pairs) == 3
    assert pairs.find(b"a", "9")
    assert not pairs.find(b"a", "6")
    for node in range(2, 12):
        pairs.add(b"%d" % node, "h", node)
    assert len(pairs) == 5
    assert len(pairs._of) <= 5
    pairs.add(b"11", "h", 12)  # a key that was registered anew
    found = pairs.find(b"11", "h")
    assert found is not None
    assert found.node == 12
    assert len(pairs) == 5
    pairs.remove(b"nobody", "h")


def test_a_long_key_ends_at_the_door() -> None:
    async def main() -> None:
        gate = Gate()
        name = NAME + b"\n" * module.LONGEST
        gate.flower.nodes[name] = NODE
        assert await gate.ask(name=name) == 401
        assert (gate.flower.calls, len(gate.door.pairs)) == (0, 0)

    run(main())


def test_an_ipv6_address_counts_by_its_network() -> None:
    found = [network(one) for one in ("10.0.0.1", "2001:db8::1", "2001:db8::2:1", "fe80::1%eth0", "x:y", "")]
    assert found == ["10.0.0.1", "2001:db8::/64", "2001:db8::/64", "fe80::/64", "x:y", ""]


def test_signatures_that_cannot_be_read_are_wrong() -> None:
    time = b"2026-11-23"
    right = {KEY: b64encode(NAME), TIME: time, SIGNATURE: b64encode(sign_message(PRIVATE, time))}
    assert module.signed(right)
    for name in right:
        for value in (b"", b"\xff", b"!!", b64encode(b"no key")):
            assert not module.signed(right | {name: value})
        assert not module.signed({one: value for one, value in right.items() if one != name})


def test_a_handler_tells_whose_call_it_is_and_flower_starts_with_the_door() -> None:
    call = fairs.Call(Fair().node(1), "x")
    current.set(call)
    handler = proved(lambda request, state, store="": f"answer {store}")
    state = SimpleNamespace(get_node_id_by_public_key={}.get)
    assert handler(request=SimpleNamespace(public_key=b"stranger"), state=state) == "answer "
    assert call.node is None
    assert handler(request=PushObjectRequest(node=Node(node_id=5)), state=state, store="s") == "answer s"
    assert call.node == 5
    current.set(None)
    assert handler(request=PushObjectRequest(node=Node(node_id=5)), state=state) == "answer "
    first, *_ = before(extensions.get_middleware, Fair())()
    assert first.cls is Door
