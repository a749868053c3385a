"""The page over real sockets, and in a browser; a run must neither wait for it nor end with it."""

import contextlib
import html
import json
import re
import socket
import subprocess
import urllib.request
from contextlib import contextmanager
from urllib.error import HTTPError

import pytest

from fedcross.core.causes import cause_of
from fedcross.core.errors import ConfigError
from fedcross.core.private_files import SHARE
from fedcross.engines.executor import punctual
from fedcross.server import live, page_variables
from fedcross.server.board import Board
from fedcross.server.live_page import PAGE
from tests.analysis.test_page import FLAGS, WATCH, browser
from tests.server.test_board import STARTED, entry, sent
from tests.support.federation import session


def filled():
    board = Board(60)
    board.note("run_started", STARTED | {"method": "<b>mine</b>", "folder": "/srv/" + "long/" * 30, "seed": 1})
    board.note("round_started", {"round": 3, "clients": [4, 5]})
    board.note("round_finished", entry(3, pool_similarity_mean=0.9))
    board.note("request_sent", sent(0, 4, node=2**63 + 1))
    board.note("request_sent", sent(1, 5))
    board.note("reply_rejected", sent(1, 5) | {"reason": "non_finite", "detail": "w"})
    return board


@contextmanager
def served(folder, host="127.0.0.1", board=None):
    page = live.Live(board or filled(), folder, host, 0)
    page.start()
    try:
        yield page
    finally:
        page.close()


def get(page, path, **headers):
    request = urllib.request.Request(f"http://127.0.0.1:{page.port}{path}", headers=headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def status(page, path, **headers):
    try:
        get(page, path, **headers)
    except HTTPError as error:
        with error:
            return error.code
    return 200


def test_page_state_metrics_and_events_on_the_loopback_interface(tmp_path):
    with served(tmp_path) as page:
        assert get(page, "/") == PAGE
        assert json.loads(get(page, "/state"))["round"] == 3
        assert "fedcross_round 3.0" in get(page, "/metrics")
        with urllib.request.urlopen(f"{page.url}events", timeout=30) as stream:
            first = json.loads(stream.readline().decode().removeprefix("data: "))
            stream.readline()
            page.board.note("run_finished", {})
            second = json.loads(stream.readline().decode().removeprefix("data: "))
        assert (first["state"], second["state"]) == ("running", "finished")
        assert status(page, "/state", Host="fedcross.example.org") == 400  # a name that leads here from elsewhere
        assert (tmp_path / live.ADDRESS).stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / live.ADDRESS).exists()


def test_idle_connections_do_not_take_the_runs_files(tmp_path):
    """A run that can open no file fails at its next checkpoint; who only connects keeps few connections."""
    with served(tmp_path) as page:
        idle = [socket.create_connection(("127.0.0.1", page.port), 30) for _ in range(punctual.MOST + 100)]
        assert get(page, "/") == PAGE
        for one in idle[:50]:
            with contextlib.suppress(ConnectionError):
                assert one.recv(1) == b""  # closed: the oldest ones; else the time is over
        assert len(page._server.server_state.connections) <= punctual.MOST + 1
        for one in idle:
            one.close()


def test_elsewhere_a_token_is_needed(tmp_path, monkeypatch):
    with served(tmp_path, "0.0.0.0") as page:
        assert len(page.token) >= 32
        assert {status(page, path) for path in ("/", "/state", "/events", "/metrics", "/?token=x")} == {401}
        assert status(page, "/metrics", Authorization=f"Bearer {page.token}") == 200
        assert status(page, "/state", Cookie=f"{live.COOKIE}={page.token}") == 200
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(f"http://127.0.0.1:{page.port}/?token={page.token}", timeout=30) as answer:
            assert (answer.geturl().rpartition("/")[2], answer.read().decode()) == ("", PAGE)
    monkeypatch.setenv(page_variables.TOKEN, "chosen")
    with served(tmp_path) as page:
        assert (status(page, "/state"), status(page, "/state", Authorization="Bearer chosen")) == (401, 200)


def test_the_token_may_be_in_a_private_file_and_the_page_behind_a_proxy(tmp_path, monkeypatch):
    file = tmp_path / "token"
    monkeypatch.setenv(page_variables.TOKEN_FILE, str(file))
    monkeypatch.setenv(page_variables.URL, "https://localhost:8444/")
    for content, mode in ((None, 0), ("", 0o600), ("secret", 0o644)):
        if content is not None:
            file.write_text(content)
            file.chmod(mode)
        with pytest.raises(ConfigError, match=page_variables.TOKEN_FILE):
            live.Live(filled(), tmp_path, "127.0.0.1", 0)
    file.chmod(0o600)
    with served(tmp_path) as page:
        assert page.url == "https://localhost:8444/?token=secret"
        assert (status(page, "/metrics"), status(page, "/metrics", Authorization="Bearer secret")) == (401, 200)
        opener = urllib.request.build_opener(NotFollowed)
        with pytest.raises(HTTPError) as moved:
            opener.open(f"http://127.0.0.1:{page.port}/?token=secret", timeout=30)
        with moved.value as answer:
            assert "Secure" in answer.headers["set-cookie"]


@pytest.mark.parametrize("token", ["secret", "a" * 43, "/" + "b" * 42, "/" + "b" * 300, "c/d" * 20])
def test_a_token_in_place_of_its_files_name_is_not_said(token, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(page_variables.TOKEN_FILE, token)
    monkeypatch.chdir(tmp_path)
    assert live.serve(filled(), tmp_path, "127.0.0.1", 0) is None
    assert page_variables.TOKEN_FILE in caplog.text
    assert token not in caplog.text


@pytest.mark.parametrize("token", ["a+b&c#d%e=f?g/h", 'a "b"; c, \\d'])
def test_a_token_of_any_signs_opens_the_address_that_is_told(tmp_path, monkeypatch, token):
    monkeypatch.setenv(page_variables.TOKEN, token)
    with served(tmp_path) as page:
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open((tmp_path / live.ADDRESS).read_text().strip(), timeout=30) as answer:
            assert (answer.geturl().rpartition("/")[2], answer.read().decode()) == ("", PAGE)
        assert status(page, "/state", Authorization=f"Bearer {token}") == 200


def test_the_address_with_the_token_is_this_users_only_where_runs_are_shared(tmp_path, monkeypatch):
    monkeypatch.setenv(SHARE, "group")
    address = tmp_path / live.ADDRESS
    address.touch(mode=0o640)  # of a run that was killed
    with served(tmp_path, "0.0.0.0"):
        assert address.stat().st_mode & 0o777 == 0o600


def test_a_page_that_others_reach_does_not_open_with_a_short_token(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv(page_variables.TOKEN, "s3cret")
    assert live.serve(filled(), tmp_path, "0.0.0.0", 0) is None
    assert "needs a token of 16 or more characters" in caplog.text
    assert "s3cret" not in caplog.text


class NotFollowed(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_):
        return None


def test_the_log_has_the_address_without_its_token(tmp_path, capsys):
    page = live.serve(filled(), tmp_path, "0.0.0.0", 0)
    page.close()
    told = capsys.readouterr().out
    assert told == f"Live page: http://0.0.0.0:{page.port}/ (with its token in {tmp_path / live.ADDRESS})\n"


def test_a_taken_port_does_not_end_a_run(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(live, "log", lambda level, text, *values: told.append(text % values))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = session(tmp_path, "serve.page=true", f"serve.port={port}", "rounds=1")
        run.execute()
    assert "no live page" in told[0]
    assert cause_of(told[0]) is None  # a later failure of the run has another cause
    assert run.board.snapshot()["state"] == "finished"


def test_a_run_with_a_page_computes_the_same_and_closes_it(tmp_path, capsys):
    digests = []
    for name, page in (("with", "true"), ("without", "false")):
        session(tmp_path / name, f"serve.page={page}", "rounds=2").execute()
        digests.append((tmp_path / name / "digests.jsonl").read_text())
    assert digests[0] == digests[1]
    url = re.search(r"Live page: (\S+)", capsys.readouterr().out)[1]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=30)


def test_the_page_of_a_run_that_goes_on_has_the_rounds_before_it(tmp_path):
    session(tmp_path, "rounds=1").execute()
    again = session(tmp_path, "rounds=2", "serve.page=true", f"resume={tmp_path}")
    again.execute()
    assert [one["round"] for one in again.board.snapshot()["curve"]] == [1, 2]


FED = """<script>class EventSource { constructor() { setTimeout(() => this.onmessage({ data: STATE }), 0); } }
const STATE = `%s`;</script>"""
LOOK = """<script>
addEventListener("load", async () => {
  const root = document.documentElement, texts = (row) => [...row.cells].map((cell) => cell.textContent);
  for (let i = 0; i < 200 && !root.dataset.drawn; i++) await new Promise((go) => setTimeout(go, 25));
  const rows = (id) => [...document.querySelectorAll(`#${id} tbody tr`)].map(texts);
  parent.postMessage(JSON.stringify({ faults, title: document.getElementById("title").textContent, slots: rows("slots"),
    devices: rows("devices"), lines: document.querySelectorAll("#curve polyline").length, width: innerWidth,
    overflow: document.scrollingElement.scrollWidth - innerWidth }), "*");
});
</script>"""
FRAME = """<body><script>addEventListener("message", (event) => {
  const one = document.createElement("pre"); one.id = "result"; one.textContent = event.data; document.body.append(one);
});</script><iframe width=%s height=900 src=copy.html></iframe></body>"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_browser_draws_it_without_fault_on_a_desk_and_a_phone(tmp_path, width):
    state = json.dumps(filled().snapshot())
    head = PAGE.replace("<title>", WATCH + FED % state + "<title>", 1)
    (tmp_path / "copy.html").write_text(head.replace("</body>", LOOK + "</body>"))
    (tmp_path / "frame.html").write_text(FRAME % width)
    place = (tmp_path / "frame.html").as_uri()
    command = [browser(), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=9000", "--dump-dom"]
    done = subprocess.run([*command, place], capture_output=True, text=True, timeout=600, check=True)
    seen = json.loads(html.unescape(re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)[1]))
    assert seen["faults"] == []
    assert seen["title"] == "<b>mine</b> on digits"  # text, never markup
    assert seen["overflow"] <= 0
    assert seen["width"] == width
    assert seen["lines"] == 2
    assert [row[3] for row in seen["slots"]] == ["with the device", "non_finite"]
    assert [row[-1] for row in seen["devices"]] == [str(2**63 + 1), "7"]


CUT = """<script>
addEventListener("load", () => setTimeout(() => {
  source.onerror();
  const one = document.createElement("pre"); one.id = "result";
  one.textContent = document.getElementById("under").textContent;
  document.body.append(one);
}, 200));
</script>"""


@pytest.mark.slow
@pytest.mark.parametrize(("event", "shown"), [(None, "The server does not answer"), ("run_failed", "ended: disk full")])
def test_a_page_whose_run_is_over_shows_how_it_ended(tmp_path, event, shown):
    board = filled()
    if event:
        board.note(event, {"text": "disk full"})
    page = PAGE.replace("<title>", FED % json.dumps(board.snapshot()) + "<title>", 1).replace(
        "</body>", CUT + "</body>"
    )
    (tmp_path / "page.html").write_text(page)
    command = [browser(), *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=9000", "--dump-dom"]
    place = (tmp_path / "page.html").as_uri()
    done = subprocess.run([*command, place], capture_output=True, text=True, timeout=600, check=True)
    assert re.search(r'<pre id="result">(.*?)</pre>', done.stdout, re.DOTALL)[1].startswith(shown)
