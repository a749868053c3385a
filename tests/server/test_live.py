"""The page over real sockets; a run must neither wait for it nor end with it."""

import json
import re
import socket
import urllib.request
from contextlib import contextmanager
from types import SimpleNamespace
from urllib.error import HTTPError

import pytest

from fedcross.core.errors import ConfigError
from fedcross.server import live as page
from fedcross.server.live import http as live
from fedcross.server.live.page import PAGE
from tests.server.test_board import STARTED, entry, sent
from tests.support.federation import session


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (live.PLACE, live.TOKEN_FILE, live.URL):
        monkeypatch.delenv(name, raising=False)


def board_of(run):
    return next(one for one in run.observers if isinstance(one, page.LivePage))


@contextmanager
def served(folder, host="127.0.0.1"):
    run = page.LivePage(folder, (host, 0))
    run.run_started(STARTED | {"seed": 1}, [])
    run.request("request_sent", sent(0, 4, node=2**63 + 1))
    run.round_finished(entry(3, test_loss=float("nan")))
    try:
        yield run._server.server_address[1]
    finally:
        run.run_ended(None)


def get(port, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def status(port, path, **headers):
    try:
        get(port, path, **headers)
    except HTTPError as error:
        with error:
            return error.code
    return 200


def test_page_state_and_metrics_on_the_loopback_interface(tmp_path):
    with served(tmp_path) as port:
        assert get(port, "/") == PAGE
        state = json.loads(get(port, "/state"), parse_constant=lambda name: pytest.fail(name))
        assert (state["round"], state["last"]["test_loss"], state["devices"][0]["node"]) == (3, None, str(2**63 + 1))
        assert "fedcross_round 3\n" in get(port, "/metrics")
        assert status(port, "/docs") == 404
        assert status(port, "/state", Host="fedcross.example.org") == 401  # a name that leads here from elsewhere
        assert status(port, "/state", Host="localhost.example.org:80") == 401
        assert (tmp_path / live.ADDRESS).stat().st_mode & 0o777 == 0o600


def test_elsewhere_a_token_is_needed(tmp_path, capsys):
    with served(tmp_path, "0.0.0.0") as port:
        address = (tmp_path / live.ADDRESS).read_text().strip()
        token = address.partition("?token=")[2]
        assert len(token) >= 32
        assert token not in capsys.readouterr().out
        assert {status(port, path) for path in ("/", "/state", "/metrics", "/?token=x")} == {401}
        assert status(port, "/metrics", Authorization=f"Bearer {token}") == 200
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"http://127.0.0.1:{port}/?token={token}", timeout=30) as answer:
            assert (answer.geturl().rpartition("/")[2], answer.read().decode()) == ("", PAGE)


def test_a_run_says_where_its_page_is_and_its_machine_may_say_it_for_all(monkeypatch):
    def asked(page, host="127.0.0.1", port=0):
        return SimpleNamespace(serve=SimpleNamespace(page=page, host=host, port=port))

    assert (live.place(asked(False)), live.place(asked(True, "::1", 5))) == (None, ("::1", 5))
    for said, place in (("0.0.0.0:8080", ("0.0.0.0", 8080)), ("[::]:0", ("::", 0))):
        monkeypatch.setenv(live.PLACE, said)
        assert live.place(asked(False)) == place
    monkeypatch.setenv(live.PLACE, "8080")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        live.place(asked(False))


@pytest.mark.parametrize("wrong", ["port", "token"])
def test_a_page_that_cannot_open_does_not_end_a_run(tmp_path, monkeypatch, wrong):
    told = []
    monkeypatch.setattr(page, "log", lambda level, text, *values: told.append(text % values))
    if wrong == "token":
        monkeypatch.setenv(live.TOKEN_FILE, str(tmp_path / "none"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if wrong == "port" else 0
        run = session(tmp_path / "run", "serve.page=true", f"serve.port={port}", "rounds=1")
        run.execute()
    assert "no live page" in told[0]
    assert board_of(run).snapshot()["state"] == "finished"


def test_a_run_with_a_page_computes_the_same_and_closes_it(tmp_path, capsys):
    digests = []
    for name, served in (("with", "true"), ("without", "false")):
        session(tmp_path / name, f"serve.page={served}", "rounds=2").execute()
        digests.append((tmp_path / name / "digests.jsonl").read_text())
    assert digests[0] == digests[1]
    url = re.search(r"Live page: (\S+)", capsys.readouterr().out)[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)
    assert not (tmp_path / "with" / live.ADDRESS).exists()


def test_the_page_of_a_run_that_goes_on_has_the_rounds_before_it(tmp_path):
    session(tmp_path, "rounds=1").execute()
    again = session(tmp_path, "rounds=2", "serve.page=true", f"resume={tmp_path}")
    again.execute()
    assert [one["round"] for one in board_of(again).snapshot()["curve"]] == [1, 2]
