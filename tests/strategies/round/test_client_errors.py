"""A local client's error: its traceback is printed once, and a run whose clients all fail alike ends."""

from bdb import BdbQuit

import pytest
from flwr.clientapp import ClientApp

from fedcross.client.app import app as client_app
from fedcross.core.errors import FederationError
from fedcross.engines import grid
from tests.support.federation import run


def failing(error, when=lambda asked: True):
    """Return the client app that raises `error` for the requests that `when` chooses."""
    app = ClientApp()

    @app.train()
    def train(message, context):
        if when(message.content.config_records["config"]):
            raise error
        return client_app(message, context)

    return app


@pytest.fixture(autouse=True)
def _nothing_printed(monkeypatch):
    monkeypatch.setattr(grid, "_printed", set())


def test_a_run_ends_when_all_clients_fail_alike(tmp_path, caplog):
    with pytest.raises(FederationError, match="NameError"):
        run(tmp_path, "method=fedavg", app=failing(NameError("name 'nett' is not defined")))
    assert caplog.text.count("Traceback") == 1
    assert "test_client_errors.py" in caplog.text


def test_a_run_goes_on_when_others_have_trained(tmp_path):
    run(tmp_path, "method=fedavg", app=failing(NameError("x"), lambda asked: asked["round"] == 2))


@pytest.mark.parametrize("error", [BdbQuit(), KeyboardInterrupt()])
def test_quitting_a_debugger_ends_the_run(tmp_path, error):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "method=fedavg", app=failing(error))
