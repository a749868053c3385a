"""What engines and grids declare, and who reads it."""

from types import ModuleType

import pytest

from fedcross.conf.compose import CONF
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.core.settings import find
from fedcross.engines.grid import LocalGrid
from fedcross.engines.job import Capabilities, engine_of
from fedcross.server.run_setup import networked
from fedcross.strategies.round.nodes import LocalClients
from tests.support.toy import app

ENGINES = sorted(path.stem for path in (CONF / "engine").glob("*.yaml"))


class Plain:
    """A grid that, like Flower's own, declares nothing."""


@pytest.mark.parametrize("name", ENGINES)
def test_every_engine_declares_what_it_can_do(name):
    declared = engine_of(find("engines", name, "engine")).CAPABILITIES
    assert declared == Capabilities(simulates=name == "ray", own_folders=name == "remote")


def test_an_engine_that_declares_nothing_is_refused_by_name():
    module = ModuleType("mine")
    module.run = lambda job: None
    with pytest.raises(ConfigError, match="mine: not an engine"):
        engine_of(module)


def test_who_is_on_a_network():
    local, plain = LocalGrid(app, 2, {}), Plain()
    assert not networked(load(()), local)
    assert networked(load(()), plain)
    assert not networked(load(("engine=ray",)), plain)
    assert not networked(load(("engine=superlink",)), local)
    assert networked(load(("engine=superlink",)), plain)


def test_what_strategies_read_of_a_grid():
    assert isinstance(LocalGrid(app, 2, {}), LocalClients)
    assert not isinstance(Plain(), LocalClients)
