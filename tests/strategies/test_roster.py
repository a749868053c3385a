from flwr.clientapp import ClientApp

from engines.local import FIRST_NODE, LocalGrid
from strategies.roster import Roster


class Growing:
    """Nodes of a foreign app without a query handler; more of them connect later."""

    def __init__(self, nodes):
        self.inner = LocalGrid(ClientApp(), 5, {})
        self.nodes = nodes
        self.push_messages, self.pull_messages = self.inner.push_messages, self.inner.pull_messages

    def get_node_ids(self):
        return [FIRST_NODE + i for i in self.nodes]


def test_foreign_nodes_that_join_later_get_numbers_of_their_own():
    grid, roster = Growing([3, 4]), Roster()
    assert roster.refresh(grid) == [0, 1]
    grid.nodes = [0, 3, 4]
    assert roster.refresh(grid) == [0, 1, 2]
    assert [roster.node(i) - FIRST_NODE for i in range(3)] == [3, 4, 0]
    grid.nodes = [0, 4]
    assert roster.refresh(grid) == [1, 2]
