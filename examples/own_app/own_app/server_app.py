"""A plain Flower server, with FedCross or Flower's FedAvg as its strategy."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from fedcross import FedCross
from own_app.task import network, test_part

app = ServerApp()


def strategy_named(name: str, clients: int, nodes: int) -> Strategy:
    """Return the strategy `name`, which trains `clients` of `nodes` clients in a round."""
    if name == "fedavg":
        return FedAvg(fraction_train=clients / nodes, fraction_evaluate=0.0, min_available_nodes=nodes)
    return FedCross(alpha=0.9, selection="in_order", clients_per_round=clients, min_available_nodes=nodes, seed=1)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train, and print the global model's accuracy after every round."""
    config = context.run_config
    strategy = strategy_named(str(config["strategy"]), int(config["clients-per-round"]), int(config["nodes"]))
    initial = ArrayRecord(network().state_dict())
    result = strategy.start(grid, initial, num_rounds=int(config["rounds"]), evaluate_fn=evaluate)
    for number, metrics in result.evaluate_metrics_serverapp.items():
        print(f"round {number}: accuracy {metrics['accuracy']:.3f}")
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")


def evaluate(_number: int, arrays: ArrayRecord) -> MetricRecord:
    """Return the global model's accuracy on the server's test set."""
    x, y = test_part()
    model = network()
    model.load_state_dict(arrays.to_torch_state_dict())
    with torch.no_grad():
        right = (model(x).argmax(1) == y).float().mean()
    return MetricRecord({"accuracy": float(right)})
