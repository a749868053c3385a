"""A classic Flower client: it knows nothing of fedcross."""

from flwr.app import Context
from flwr.client import Client, NumPyClient
from flwr.clientapp import ClientApp
from flwr.common import NDArrays, Scalar
from torch import optim
from torch.nn.functional import cross_entropy

from classic_app.task import load, network, numbers, own_part


class Digits(NumPyClient):
    """One client: part `part` of `parts`."""

    def __init__(self, part: int, parts: int) -> None:
        self.part, self.parts = part, parts

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Tell the partition: clients are drawn and ordered by it (without it, by their random client ids)."""
        return {"partition-id": self.part}

    def fit(self, parameters: NDArrays, config: dict[str, Scalar]) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train the received model for one epoch on this client's part."""
        x, y = own_part(self.part, self.parts)
        model = network()
        load(model, parameters)
        optimiser = optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for start in range(0, len(y), 16):
            optimiser.zero_grad()
            cross_entropy(model(x[start : start + 16]), y[start : start + 16]).backward()
            optimiser.step()
        return numbers(model), len(y), {}


def client_fn(context: Context) -> Client:
    """Return the client of one node."""
    config = context.node_config
    return Digits(int(config["partition-id"]), int(config["num-partitions"])).to_client()


app = ClientApp(client_fn=client_fn)
