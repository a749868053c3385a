"""Where a run's page is: what the run says, and what the machine says."""

import sys
import urllib.request
from types import SimpleNamespace

from fedcross.engines.flower import free_ports
from fedcross.server import page_variables, serving
from tests.support.federation import session


def asked(page, host="127.0.0.1", port=0):
    return SimpleNamespace(serve=SimpleNamespace(page=page, host=host, port=port))


def test_a_run_says_where_its_page_is_and_its_machine_may_say_more(monkeypatch):
    monkeypatch.delenv(page_variables.PLACE, raising=False)
    assert serving.place(asked(False)) is None
    assert serving.place(asked(True, "::1", 5)) == ("::1", 5)
    for said, place in (("0.0.0.0:8080", ("0.0.0.0", 8080)), ("[::]:0", ("::", 0)), ("", None)):
        monkeypatch.setenv(page_variables.PLACE, said)
        assert serving.place(asked(False)) == place


def test_a_run_that_asks_for_no_page_has_one_where_the_machine_says(tmp_path, monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv(page_variables.PLACE, f"127.0.0.1:{port}")
    seen = []

    def look(entry):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            seen.append(answer.read().decode())

    run = session(tmp_path, "rounds=1")
    run.progress = SimpleNamespace(start=lambda *_: None, round=look, stop=lambda: None)
    run.execute()
    assert 'fedcross_run_info{method="fedcross"' in seen[0]


def test_without_its_libraries_a_page_that_the_machine_asks_for_is_left_out(tmp_path, monkeypatch):
    told = []
    monkeypatch.setenv(page_variables.PLACE, "127.0.0.1:0")
    monkeypatch.setitem(sys.modules, "fedcross.server.live", None)
    monkeypatch.setattr(serving, "log", lambda level, text, *values: told.append(text % values))
    assert session(tmp_path, "rounds=1").execute()["rounds"] == 1
    assert "pip install -e '.[page]'" in told[0]
