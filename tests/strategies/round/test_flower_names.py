"""Who comes from Flower keeps what means the same and is told what to write for the rest."""

import pytest
from flwr.serverapp.strategy import FedAvg as TheirFedAvg

from fedcross.core.errors import ConfigError
from fedcross.strategies.classic import ClassicFedCross
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.round import flower_names

HERE = "the number of clients that train in a round is fixed here. Write clients_per_round="
SERVER = "clients do not evaluate, the server does. Leave it out, give evaluate_fn to start()."


def test_what_means_the_same_is_accepted():
    method = FedCross(
        clients_per_round=3, min_available_nodes=7, fraction_evaluate=0.0, min_evaluate_nodes=0,
        arrayrecord_key="arrays", weighted_by_key="num-examples", configrecord_key="config", train_metrics_aggr_fn=None,
    )  # fmt: skip
    assert (method.federation.min_clients, method.federation.clients_per_round) == (7, 3)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"fraction_train": 0.5}, f"fraction_train=0.5: {HERE}N."),
        ({"fraction_train": 0.5, "min_available_nodes": 10}, f"fraction_train=0.5: {HERE}5."),
        ({"min_train_nodes": 4}, f"min_train_nodes=4: {HERE}4."),
        (
            {"fraction_train": 0.1, "min_train_nodes": 4, "min_available_nodes": 10},
            f"fraction_train=0.1, min_train_nodes=4: {HERE}4.",
        ),
        ({"fraction_train": 0.1, "min_train_nodes": 4}, f"fraction_train=0.1, min_train_nodes=4: {HERE}N."),
        ({"fraction_train": "half"}, f"fraction_train='half': {HERE}N."),
        ({"fraction_evaluate": 1.0}, f"fraction_evaluate=1.0: {SERVER}"),
        ({"min_evaluate_nodes": 2}, f"min_evaluate_nodes=2: {SERVER}"),
        ({"evaluate_metrics_aggr_fn": len}, "evaluate_metrics_aggr_fn=len: clients do not evaluate, the server does. "
         "Leave it out."),
        ({"weighted_by_key": "n"}, "weighted_by_key='n': clients must tell num-examples. Leave it out."),
        (
            {"min_available_nodes": 3, "min_clients": 4},
            "min_available_nodes=3 and min_clients=4 mean the same. Give one of them.",
        ),
        (
            {"fraction_fit": 0.5},
            "fraction_fit=0.5: an argument of Flower's classic API. Wrap the method and give it there: "
            "ClassicFedCross(FedCross(...), fraction_fit=...).",
        ),
        ({"min_available_nodes": 0}, "min_clients=0: must be null or a whole number, 1 or more."),
        ({"proximal_mu": 0.1}, "proximal_mu: unknown setting."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", [FedCross, FedAvg])
def test_what_does_not_is_answered_in_our_words(method, values, told):
    with pytest.raises(ConfigError) as refused:
        method(**values)
    assert str(refused.value).startswith(f"{method.__name__}: {told}")
    assert len(refused.value.faults) == 1


def test_every_argument_of_flowers_fedavg_has_an_answer():
    import inspect

    known = {*flower_names.ONLY, flower_names.AVAILABLE, flower_names.FRACTION, flower_names.LEAST}
    assert set(inspect.signature(TheirFedAvg).parameters) == known


def test_the_classic_options_that_a_method_decides_are_not_ignored():
    with pytest.raises(ConfigError) as refused:
        ClassicFedCross(FedCross(), fraction_fit=0.5, min_fit_clients=4, min_available_clients=8)
    assert refused.value.faults == [
        "ClassicFedCross: fraction_fit=0.5, min_fit_clients=4: the number of clients that train in a round is the "
        "method's. Write FedCross(clients_per_round=4).",
        "ClassicFedCross: min_available_clients=8: Write FedCross(min_clients=8).",
    ]
