"""What is wrong with the arguments of a strategy is told before a run; what Flower runs is not refused."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.serverapp import strategy as flower

from fedcross.strategies.flower.foreign import build, is_private
from fedcross.strategies.flwr import FlwrParams


class Annotated(flower.FedAvg):
    """Arguments with each simple kind, two of them as ``from __future__ import annotations`` leaves them."""

    def __init__(
        self, share: float = 0.5, steps: int | None = 3, name: str = "a", fast: bool = False, rest: Any = None
    ) -> None:
        super().__init__()
        self.given = share, steps, name, fast, rest


OWN = f"{__name__}:Annotated"


@pytest.mark.parametrize(
    ("argument", "value", "wanted"),
    [
        ("share", "abc", "a number"),
        ("share", [1], "a number"),
        ("share", None, "a number"),
        ("steps", 2.5, "an integer or null"),
        ("name", 5, "a text"),
        ("fast", "no", "true or false"),
    ],
)
def test_an_argument_of_another_kind_is_refused(argument: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError, match=f"Annotated wants {wanted} for '{argument}', not "):
        build(OWN, {argument: value}, 3)


@pytest.mark.parametrize(
    "given",
    [{"share": 1}, {"share": True}, {"steps": None}, {"steps": 2}, {"fast": 1}, {"name": ""}, {"rest": {"a": [1]}}],
    ids=str,
)
def test_what_fits_is_taken(given: dict[str, Any]) -> None:
    assert set(given.values()) <= set(build(OWN, given, 3).given) if "rest" not in given else build(OWN, given, 3)


def test_flowers_own_arguments_are_looked_at() -> None:
    with pytest.raises(ValueError, match="FedAdam wants a number for 'eta', not 'abc'"):
        build("FedAdam", {"eta": "abc"}, 3)
    inner = {"strategy": "FedAdam", "arguments": {"eta": "abc"}}
    wrapper = {"strategy": inner, "noise_multiplier": 1.0, "clipping_norm": 1.0}
    with pytest.raises(ValueError, match="FedAdam wants a number for 'eta'"):
        build("DifferentialPrivacyServerSideFixedClipping", wrapper, 3)


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (
            "fraction_train",
            r"^FedAvg has no option 'fraction_train' here: fedcross sets it\. Write clients_per_round=N\.$",
        ),
        ("weighted_by_key", r"^FedAvg has no option 'weighted_by_key' here: fedcross sets it\. Leave it out\.$"),
        ("fraction", r"^FedAvg has no option 'fraction'\. Known: none\.$"),
    ],
)
def test_who_looks_for_an_option_that_fedcross_sets_is_told_ours(argument: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        build("FedAvg", {argument: 0.5}, 3)


@pytest.mark.parametrize(
    ("name", "arguments", "clients", "fault"),
    [
        ("Bulyan", {"num_malicious_nodes": 1}, 6, "=1 needs 7 replies a round, clients_per_round=6 gives fewer"),
        ("Bulyan", {}, 2, "=0 needs 3 replies"),
        ("Bulyan", {"num_malicious_nodes": -1}, 6, "=-1. Give 0 or more"),
        ("Krum", {"num_malicious_nodes": 5}, 3, "=5 needs 13 replies"),
        ("MultiKrum", {"num_nodes_to_select": 0}, 3, "num_nodes_to_select=0. Give 1 or more"),
    ],
)
def test_numbers_that_can_never_make_a_model_are_refused(
    name: str, arguments: dict[str, Any], clients: int, fault: str
) -> None:
    (found,) = FlwrParams(name=name, arguments=arguments).faults(clients)
    assert fault in found
    wrapped = {"strategy": {"strategy": name, "arguments": arguments}, "noise_multiplier": 1.0, "clipping_norm": 1.0}
    around = FlwrParams(name="DifferentialPrivacyServerSideFixedClipping", arguments=wrapped)
    assert around.faults(clients) == [found]


@pytest.mark.parametrize(
    ("name", "arguments", "clients"),
    [
        ("Bulyan", {"num_malicious_nodes": 1}, 7),
        ("Bulyan", {}, 3),
        ("Krum", {}, 1),
        ("Krum", {"num_malicious_nodes": 1}, 5),
        ("MultiKrum", {"num_nodes_to_select": 9}, 3),
        ("FedTrimmedAvg", {"beta": 0.4}, 1),
    ],
)
def test_what_flower_runs_is_not_refused(name: str, arguments: dict[str, Any], clients: int) -> None:
    params = FlwrParams(name=name, arguments=arguments)
    assert (params.faults(clients), params.round_remarks(clients)) == ([], [])


def test_krum_with_fewer_replies_than_its_paper_wants_runs_with_a_remark() -> None:
    params = FlwrParams(name="Krum", arguments={"num_malicious_nodes": 1})
    assert params.faults(3) == []
    assert params.round_remarks(3) == [
        "method: Krum: num_malicious_nodes=1, clients_per_round=3: what Krum's paper promises holds from 5 replies on."
    ]


def test_an_own_aggregation_is_not_judged() -> None:
    class Mine(flower.Bulyan):
        def aggregate_train(self, *_: Any) -> Any:
            return None, None

    from fedcross.strategies.flower.foreign import shortfalls

    assert shortfalls(Mine(num_malicious_nodes=9), 2) == []


def test_a_subclass_of_a_wrapper_for_privacy_is_one() -> None:
    class Mine(flower.DifferentialPrivacyServerSideFixedClipping):
        """Adds nothing."""

    assert is_private(Mine(flower.FedAvg(), 1.0, 1.0, 3))
    assert not is_private(flower.FedAvg())


class Handing(flower.DifferentialPrivacyServerSideFixedClipping):
    """A wrapper that hands on whatever it gets."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


class Below(Handing):
    """One that has an argument of its own besides."""

    def __init__(self, own: float = 1.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.own = own


class Settled(flower.DifferentialPrivacyServerSideFixedClipping):
    """One that says itself how many clients there are, and that hands the rest on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(num_sampled_clients=17, **kwargs)


@pytest.mark.parametrize(
    ("kind", "more", "sampled"),
    [
        (Handing, {}, 5),
        (Handing, {"num_sampled_clients": 9}, 9),
        (Below, {"own": 2.0}, 5),
        (Settled, {}, 17),
    ],
)
def test_a_wrapper_that_hands_its_arguments_on_is_told_the_clients(kind: type, more: dict[str, Any], sampled: int):
    arguments = {"strategy": "FedAdam", "noise_multiplier": 0.1, "clipping_norm": 1.0}
    built: Any = build(f"{__name__}:{kind.__name__}", arguments | more, 5)
    assert built.num_sampled_clients == sampled
    assert isinstance(built.strategy, flower.FedAdam)


def test_what_is_handed_on_is_checked_as_if_it_were_its_own() -> None:
    given = {"strategy": "FedAdam", "noise_multiplier": "much", "clipping_norm": 1.0}
    with pytest.raises(ValueError, match="Below wants a number for 'noise_multiplier', not 'much'"):
        build(f"{__name__}:Below", given, 3)
    with pytest.raises(ValueError, match=r"refuses these options.*unexpected keyword argument 'nix'"):
        build(f"{__name__}:Below", {"strategy": "FedAdam", "noise_multiplier": 1, "clipping_norm": 1, "nix": 2}, 3)
    with pytest.raises(ValueError, match=r"refuses these options.*missing.*'clipping_norm'"):
        build(f"{__name__}:Settled", {"strategy": "FedAdam", "noise_multiplier": 1}, 3)
