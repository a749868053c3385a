"""A device gets no folder and no address of the server, and composes what it composed before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from flwr.common.serde import user_config_to_proto
from flwr.proto.node_pb2 import Node
from flwr.proto.run_pb2 import GetRunRequest, GetRunResponse, Run

from fedcross.conf.schema import SERVER_ONLY, load_for_client
from fedcross.core import run_config
from fedcross.core.overrides import join, split
from fedcross.engines.executor import told

SERVERS = [
    "output=/srv/a run",
    "engine=remote",
    "engine.address=superlink:8000",
    "+logger.dir=/srv",
    "hydra.run.dir=/srv",
]
CLIENTS = ["method=fedcross", "task=digits", "partition.clients=10", "seed=4", "data_root='/data/of a device'"]


def asked(config: dict[str, Any]) -> dict[str, Any]:
    """Return the run config that a device gets."""

    def get_run(request: GetRunRequest, state: Any) -> GetRunResponse:
        assert request.run_id == 5
        return GetRunResponse(run=Run(run_id=5, override_config=user_config_to_proto(config)))

    handler = told.without_the_servers(get_run)
    answer = handler(request=GetRunRequest(node=Node(node_id=7), run_id=5), state=SimpleNamespace())
    assert answer.run.run_id == 5
    return {key: getattr(one, str(one.WhichOneof("scalar"))) for key, one in answer.run.override_config.items()}


def test_the_servers_settings_stay_with_the_server_and_the_client_composes_the_same() -> None:
    whole = join([SERVERS[0], *CLIENTS, *SERVERS[1:]])
    found = asked({run_config.OVERRIDES: whole, "seed": 9})
    assert found["seed"] == 9
    assert split(found[run_config.OVERRIDES]) == CLIENTS
    assert "srv" not in str(found)
    assert "8000" not in str(found)
    assert load_for_client(run_config.overrides_of(found)) == load_for_client(
        run_config.overrides_of({**found, run_config.OVERRIDES: whole})
    )


def test_an_app_that_got_overrides_still_gets_some() -> None:
    """Without any, typed keys count, and a federation of unknown size is an error."""
    found = asked({run_config.OVERRIDES: join(SERVERS), "clients": 0})
    assert split(found[run_config.OVERRIDES])
    assert "srv" not in str(found)
    assert run_config.overrides_of(found) == found[run_config.OVERRIDES]
    assert found[run_config.OVERRIDES].split("=")[0] in SERVER_ONLY


@pytest.mark.parametrize("config", [{}, {"overrides": 3}, {"overrides": 'it"s no list'}, {"overrides": "a=1  b=2"}])
def test_what_is_not_ours_stays(config: dict[str, Any]) -> None:
    assert asked(config) == config


def test_the_settings_are_those_that_a_client_leaves_out() -> None:
    assert SERVER_ONLY | {"hydra"} == told.SERVERS
    assert told.OVERRIDES == run_config.OVERRIDES
