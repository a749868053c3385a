"""What a machine says of the live page, and what is no token."""

import pytest

from fedcross.core.errors import ConfigError
from fedcross.server import page_variables


@pytest.mark.parametrize("said", ["8080", "host:", ":80", "host:x", "host:70000", "host:-1", "t" * 43])
def test_a_place_that_is_none_is_refused_and_not_said(monkeypatch, said):
    monkeypatch.setenv(page_variables.PLACE, said)
    with pytest.raises(ConfigError, match="Give HOST:PORT") as caught:
        page_variables.own_place()
    assert f"{page_variables.PLACE}=({len(said)} characters)" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("token", ["  ", " " * 20, "t" * 20 + " ", "t" * 10 + "\n" + "t" * 10, "t" * 20 + "é"])
def test_a_token_that_no_browser_sends_back_is_refused_and_not_said(monkeypatch, host, token):
    monkeypatch.setenv(page_variables.TOKEN, token)
    with pytest.raises(ConfigError, match=f"{page_variables.TOKEN}: .*{len(token)} characters.*: a token is") as caught:
        page_variables.given_token(host)
    assert token.strip() not in str(caught.value) or not token.strip()


def test_a_token_that_is_a_files_name_is_refused(tmp_path, monkeypatch):
    """Else everybody who knows the deployment knows the token."""
    file = tmp_path / "token"
    file.write_text("t" * 32)
    file.chmod(0o600)
    monkeypatch.setenv(page_variables.TOKEN, str(file))
    with pytest.raises(ConfigError, match=f"a file's name, and no token. Name the file in {page_variables.TOKEN_FILE}"):
        page_variables.given_token("127.0.0.1")
    monkeypatch.delenv(page_variables.TOKEN)
    monkeypatch.setenv(page_variables.TOKEN_FILE, str(file))
    assert page_variables.given_token("0.0.0.0") == "t" * 32
    monkeypatch.setenv(page_variables.TOKEN, "/" + "t" * 500)  # longer than a name can be
    assert page_variables.given_token("0.0.0.0") == "/" + "t" * 500


def test_where_others_reach_the_page_its_token_is_no_short_word(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.touch(mode=0o600)
    for token, good in (("x", False), ("x" * 15, False), ("x" * 16, True)):
        monkeypatch.setenv(page_variables.TOKEN, token)
        monkeypatch.delenv(page_variables.TOKEN_FILE, raising=False)
        assert [page_variables.given_token(host) for host in ("127.0.0.1", "::1", "localhost")] == [token] * 3
        for _ in range(2):
            for host in ("0.0.0.0", "::", "fl.example.org"):
                if good:
                    assert page_variables.given_token(host) == token
                    continue
                with pytest.raises(ConfigError, match="16 or more characters") as caught:
                    page_variables.given_token(host)
                assert token not in str(caught.value) or token == "x"
            file.write_text(token)
            monkeypatch.delenv(page_variables.TOKEN, raising=False)
            monkeypatch.setenv(page_variables.TOKEN_FILE, str(file))


def test_an_address_that_is_none_is_not_said(monkeypatch):
    monkeypatch.setenv(page_variables.URL, "t" * 43)
    with pytest.raises(ConfigError, match=f"{page_variables.URL}=.43 characters.: this is no address"):
        page_variables.check()
    monkeypatch.setenv(page_variables.URL, "https://localhost:8444/")
    page_variables.check()
