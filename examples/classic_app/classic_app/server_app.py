"""A classic Flower server with FedCross as its strategy."""

import torch
from flwr.app import Context
from flwr.common import NDArrays, Scalar, ndarrays_to_parameters
from flwr.compat.server import ServerAppComponents
from flwr.server import ServerConfig
from flwr.serverapp import ServerApp

from classic_app.task import load, network, numbers, test_part
from fedcross import ClassicFedCross, FedCross


def evaluate(number: int, arrays: NDArrays, _config: dict[str, Scalar]) -> tuple[float, dict[str, Scalar]]:
    """Return the global model's loss and accuracy on the server's test set, and print the accuracy."""
    x, y = test_part()
    model = network()
    load(model, arrays)
    with torch.no_grad():
        scores = model(x)
    accuracy = float((scores.argmax(1) == y).float().mean())
    print(f"round {number}: accuracy {accuracy:.3f}")
    return float(torch.nn.functional.cross_entropy(scores, y)), {"accuracy": accuracy}


def server_fn(context: Context) -> ServerAppComponents:
    """Return the server: FedCross, in Flower's classic clothes."""
    config = context.run_config
    method = FedCross(
        alpha=0.9,
        selection="in_order",
        clients_per_round=int(config["clients-per-round"]),
        min_clients=int(config["nodes"]),
        seed=1,
    )
    model = network()
    strategy = ClassicFedCross(
        method,
        names=list(model.state_dict()),
        initial_parameters=ndarrays_to_parameters(numbers(model)),
        evaluate_fn=evaluate,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=int(config["rounds"])))


app = ServerApp(server_fn=server_fn)
