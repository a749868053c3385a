"""Where a run's page is: what the run says, and what the machine says."""

import sys
import urllib.request
from types import SimpleNamespace

import pytest

from fedcross.core.errors import ConfigError
from fedcross.engines.flower import free_ports
from fedcross.server import serving
from tests.support.federation import session


def asked(page, host="127.0.0.1", port=0):
    return SimpleNamespace(serve=SimpleNamespace(page=page, host=host, port=port))


def test_a_run_says_where_its_page_is_and_its_machine_may_say_more(monkeypatch):
    monkeypatch.delenv(serving.PLACE, raising=False)
    assert serving.place(asked(False)) is None
    assert serving.place(asked(True, "::1", 5)) == ("::1", 5)
    for said, place in (("0.0.0.0:8080", ("0.0.0.0", 8080)), ("[::]:0", ("::", 0)), ("", None)):
        monkeypatch.setenv(serving.PLACE, said)
        assert serving.place(asked(False)) == place


@pytest.mark.parametrize("said", ["8080", "host:", ":80", "host:x", "host:70000", "host:-1", "t" * 43])
def test_a_place_that_is_none_is_refused_and_not_said(monkeypatch, said):
    monkeypatch.setenv(serving.PLACE, said)
    with pytest.raises(ConfigError, match="Give HOST:PORT") as caught:
        serving.place(asked(False))
    assert f"{serving.PLACE}=({len(said)} characters)" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("token", ["  ", " " * 20, "t" * 20 + " ", "t" * 10 + "\n" + "t" * 10, "t" * 20 + "é"])
def test_a_token_that_no_browser_sends_back_is_refused_and_not_said(monkeypatch, host, token):
    monkeypatch.setenv(serving.TOKEN, token)
    with pytest.raises(ConfigError, match=f"{serving.TOKEN}: .*{len(token)} characters.*: a token is") as caught:
        serving.given_token(host)
    assert token.strip() not in str(caught.value) or not token.strip()


def test_a_token_that_is_a_files_name_is_refused(tmp_path, monkeypatch):
    """Else everybody who knows the deployment knows the token."""
    file = tmp_path / "token"
    file.write_text("t" * 32)
    file.chmod(0o600)
    monkeypatch.setenv(serving.TOKEN, str(file))
    with pytest.raises(ConfigError, match=f"a file's name, and no token. Name the file in {serving.TOKEN_FILE}"):
        serving.given_token("127.0.0.1")
    monkeypatch.delenv(serving.TOKEN)
    monkeypatch.setenv(serving.TOKEN_FILE, str(file))
    assert serving.given_token("0.0.0.0") == "t" * 32
    monkeypatch.setenv(serving.TOKEN, "/" + "t" * 500)  # longer than a name can be
    assert serving.given_token("0.0.0.0") == "/" + "t" * 500


def test_where_others_reach_the_page_its_token_is_no_short_word(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    for token, good in (("x", False), ("x" * 15, False), ("x" * 16, True)):
        monkeypatch.setenv(serving.TOKEN, token)
        monkeypatch.delenv(serving.TOKEN_FILE, raising=False)
        assert [serving.given_token(host) for host in ("127.0.0.1", "::1", "localhost")] == [token] * 3
        for _ in range(2):
            for host in ("0.0.0.0", "::", "fl.example.org"):
                if good:
                    assert serving.given_token(host) == token
                    continue
                with pytest.raises(ConfigError, match="16 or more characters") as caught:
                    serving.given_token(host)
                assert token not in str(caught.value) or token == "x"
            file.write_text(token)
            monkeypatch.delenv(serving.TOKEN, raising=False)
            monkeypatch.setenv(serving.TOKEN_FILE, str(file))


def test_an_address_that_is_none_is_not_said(monkeypatch):
    monkeypatch.setenv(serving.URL, "t" * 43)
    with pytest.raises(ConfigError, match=f"{serving.URL}=.43 characters.: this is no address"):
        serving.check_variables()
    monkeypatch.setenv(serving.URL, "https://localhost:8444/")
    serving.check_variables()


def test_a_run_that_asks_for_no_page_has_one_where_the_machine_says(tmp_path, monkeypatch):
    (port,) = free_ports(1)
    monkeypatch.setenv(serving.PLACE, f"127.0.0.1:{port}")
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
    monkeypatch.setenv(serving.PLACE, "127.0.0.1:0")
    monkeypatch.setitem(sys.modules, "fedcross.server.live", None)
    monkeypatch.setattr(serving, "log", lambda level, text, *values: told.append(text % values))
    assert session(tmp_path, "rounds=1").execute()["rounds"] == 1
    assert "pip install -e '.[page]'" in told[0]
