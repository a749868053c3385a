import inspect

import numpy as np
import pytest
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy

import fedcross
from docs.stub import PATH, stub
from fedcross.core.errors import ConfigError, FederationError
from fedcross.engines.grid import LocalGrid
from fedcross.strategies.wire.records import encode

INITIAL = {"w": np.zeros(2, np.float32), "n": np.array(0, np.int64)}


def app(fails=()):
    """Return a plain Flower client: it adds its partition + 1 to every parameter."""
    made = ClientApp()

    @made.train()
    def train(message, context):
        client = int(context.node_config["partition-id"])
        if client in fails:
            raise RuntimeError("down")
        arrays = {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}
        arrays["w"] = arrays["w"] + np.float32(client + 1)
        metrics = MetricRecord({"num-examples": 4, "train-loss": 1.0})
        return Message(RecordDict({"arrays": encode(arrays), "metrics": metrics}), reply_to=message)

    return made


def grid(clients=4, fails=()):
    return LocalGrid(app(fails), clients, {})


def values(arrays):
    return {name: array.numpy() for name, array in arrays.items()}


def test_a_method_is_a_flower_strategy_with_few_names():
    assert issubclass(fedcross.FedCross, Strategy)
    names = {name for name in dir(fedcross.FedCross) if not name.startswith("_")}
    six = {"start", "configure_train", "aggregate_train", "configure_evaluate", "aggregate_evaluate", "summary"}
    assert six <= names
    assert len(names - six) <= 12


def test_the_signature_shows_settings_with_defaults():
    parameters = inspect.signature(fedcross.FedCross).parameters
    assert next(iter(parameters)) == "alpha"
    assert parameters["selection"].default == "lowest_similarity"
    assert parameters["clients_per_round"].default == 10


def test_start_runs_rounds_and_averages():
    """Clients 0 to 3 add 1 to 4 in each of two rounds: the mean moves by 2.5 a round."""
    strategy = fedcross.FedAvg(clients_per_round=4)
    result = strategy.start(grid(), ArrayRecord({n: encode({n: a})[n] for n, a in INITIAL.items()}), num_rounds=2)
    assert values(result.arrays)["w"] == pytest.approx([5.0, 5.0])
    assert result.train_metrics_clientapp[2]["train-loss"] == 1.0


def test_flowers_own_loop_gives_the_same_model():
    whole = fedcross.FedCross(clients_per_round=3, seed=2)
    result = whole.start(grid(), encode(INITIAL), num_rounds=3)
    stepped, link = fedcross.FedCross(clients_per_round=3, seed=2), grid()
    arrays = encode(INITIAL)
    for number in (1, 2, 3):
        messages = list(stepped.configure_train(number, arrays, ArrayRecord() and {}, link))
        ids = set(link.push_messages(messages))
        replies = []
        while ids:
            found = list(link.pull_messages(ids))
            ids -= {reply.metadata.reply_to_message_id for reply in found}
            replies += found
        arrays, _ = stepped.aggregate_train(number, replies)
    assert all((values(result.arrays)[n] == a).all() for n, a in values(arrays).items())


def test_should_stop_ends_a_run():
    strategy = fedcross.FedAvg(clients_per_round=2)
    result = strategy.start(grid(), encode(INITIAL), num_rounds=9, should_stop=lambda number, result: number == 2)
    assert list(result.train_metrics_clientapp) == [1, 2]


def test_flowers_names_are_taken_where_they_mean_something():
    strategy = fedcross.FedCross(fraction_train=0.5, min_train_nodes=1, min_available_nodes=2, fraction_evaluate=0)
    strategy.start(grid(4), encode(INITIAL), num_rounds=1)
    assert strategy.settings.clients_per_round == 2
    with pytest.raises(ConfigError, match="fraction_evaluate"):
        fedcross.FedCross(fraction_evaluate=0.5)
    with pytest.raises(ConfigError, match="alhpa"):
        fedcross.FedCross(alhpa=0.9)


def test_nobody_answers():
    with pytest.raises(FederationError, match="nothing was trained"):
        fedcross.FedAvg(clients_per_round=2).start(grid(2, fails=(0, 1)), encode(INITIAL), num_rounds=2)


def test_the_stub_is_up_to_date():
    assert PATH.read_text() == stub()
