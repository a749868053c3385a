import pytest
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fedcross import tell_partition
from fedcross.core.errors import ConfigError
from fedcross.engines.grid import LocalGrid
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.settings import RoundSettings
from tests.examples.test_own_app import Nameless


def test_an_app_of_ones_own_tells_its_partitions():
    nodes = Ledger(RoundSettings()).nodes
    assert nodes.refresh(Nameless(LocalGrid(tell_partition(ClientApp()), 3, {}))) == [0, 1, 2]


def test_a_node_without_a_partition_is_told():
    with pytest.raises(ConfigError, match="has no partition-id"):
        tell_partition(ClientApp())(
            Message(RecordDict(), dst_node_id=1, message_type="query"), Context(1, 1, {}, RecordDict(), {})
        )
