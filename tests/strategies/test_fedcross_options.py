"""Every option of FedCross, worked by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Round, Upload
from tests.support.federation import run, same, session
from tests.support.game import Game


def begun(clients, d=1, buffers=0, **values):
    """A FedCross whose models are `d` parameters, `buffers` running means and a counter, all zero."""
    arrays = {"w": np.zeros(d, np.float32), "mean": np.zeros(buffers, np.float32), "n": np.array(0, np.int64)}
    return Game(FedCross, arrays, {"w"}, clients_per_round=clients, **values)


def uploads(*models, slots=None, means=None):
    slots = range(len(models)) if slots is None else slots
    means = means or [np.zeros(0)] * len(models)
    return [
        Upload(i, slot, {"w": np.float32(model), "mean": np.float32(mean), "n": np.array(0)}, {}, 1, {})
        for i, (slot, model, mean) in enumerate(zip(slots, models, means))
    ]


def aggregate(method, number, ups):
    return method.aggregate(Round(number, 0, tuple(range(len(ups))), 7), ups)


def mixed(method, number, *models):
    """Aggregate models of one value each and return the new values."""
    aggregate(method, number, uploads(*([m] for m in models)))
    return method.pool.rows[:, 0].tolist()


# ---- propellers ------------------------------------------------------------------------------------------------


def test_propellers_with_alpha_by_hand():
    # K=4, P=2, round 1: offsets 1 and 2. alpha .5: w_i = .5 v_i + .25 v_(i+1) + .25 v_(i+2), v = 0, 4, 8, 16.
    # w0 = 1 + 2 = 3; w1 = 2 + 2 + 4 = 8; w2 = 4 + 4 + 0 = 8; w3 = 8 + 0 + 1 = 9. Sum 28 as before.
    method = begun(4, mode="propellers", propeller_weighting="alpha", alpha=0.5)
    assert mixed(method, 1, 0, 4, 8, 16) == [3, 8, 8, 9]


def test_propellers_with_equal_weights_by_hand():
    # The same with thirds: w0 = (0+4+8)/3 = 4; w1 = 28/3; w2 = 24/3 = 8; w3 = 20/3. alpha plays no part.
    method = begun(4, mode="propellers", propeller_weighting="equal", alpha=0.9)
    assert mixed(method, 1, 0, 4, 8, 16) == pytest.approx([4, 28 / 3, 8, 20 / 3])


def test_propellers_move_on_with_the_round_and_are_at_most_all_others():
    # Round 3, P=2 of 3 possible offsets: the first is in-order's (r=2 -> 3), the second follows cyclically (1).
    # w0 = .5*0 + .25*(16 + 4) = 5. With P=9 all three others count (1-alpha)/3 each: w0 = (4+8+16)/6.
    own = {"mode": "propellers", "propeller_weighting": "alpha", "alpha": 0.5}
    assert mixed(begun(4, **own), 3, 0, 4, 8, 16)[0] == 5
    many = begun(4, **own, propellers=9)
    assert mixed(many, 1, 0, 4, 8, 16)[0] == pytest.approx(28 / 6)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 12), st.floats(0.5, 1), st.integers(0, 2**31))
def test_one_propeller_is_in_order(k, number, alpha, seed):
    values = np.random.default_rng(seed).normal(size=k).tolist()
    own = {"mode": "propellers", "propellers": 1, "propeller_weighting": "alpha"}
    one = mixed(begun(k, **own, alpha=alpha), number, *values)
    assert one == mixed(begun(k, selection="in_order", alpha=alpha), number, *values)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from(["alpha", "equal", "each"]), st.integers(0, 2**31))
def test_propellers_keep_the_mean(k, p, weighting, seed):
    values = np.random.default_rng(seed).normal(size=k)
    method = begun(k, mode="propellers", propellers=p, propeller_weighting=weighting, alpha=0.85)
    assert np.mean(mixed(method, 5, *values)) == pytest.approx(values.mean(), abs=1e-6)


# ---- schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "number", "alpha"),
    [
        # t = (r - 1)/(R - 1) with R = 5; linear .5 + .4 t; cosine .5 + .4 (1 - cos(pi t))/2, which at t = 1/4 is
        # .5 + .4 (1 - .70711)/2 = .558579.
        ("linear", 1, 0.5),
        ("linear", 2, 0.6),
        ("linear", 5, 0.9),
        ("linear", 99, 0.9),
        ("cosine", 1, 0.5),
        ("cosine", 2, 0.5585786),
        ("cosine", 3, 0.7),
        ("cosine", 9, 0.9),
    ],
)
def test_dynamic_alpha(schedule, number, alpha):
    # Two models 0 and 1: w0 = 1 - alpha.
    ramp = {"schedule": schedule, "start": 0.5, "end": 0.9, "rounds": 5}
    assert mixed(begun(2, alpha=ramp), number, 0, 1) == pytest.approx([1 - alpha, alpha])


@pytest.mark.slow
def test_pm_da_switches_after_its_first_stage():
    # File conf/method/fedcross_pm_da.yaml. Round 50: two propellers at .99 of offsets (49 mod 3) + 1 = 2 and 3:
    # w0 = .99*0 + .005*(8 + 16); with equal weights, the default, w3 = (16 + 4 + 8)/3.
    # Round 51: one collaborator at alpha .5, in order of offset 50 mod 3 + 1 = 3: w0 = 8.
    own = ("method=fedcross_pm_da", "method.selection=in_order")
    params, shares = load(own).method, load((*own, "method.propeller_weighting=alpha")).method
    early, equal, late = (begun(4, **chosen.model_dump()) for chosen in (shares, params, params))
    assert mixed(early, 50, 0, 4, 8, 16)[0] == pytest.approx(0.12)
    assert mixed(equal, 50, 0, 4, 8, 16)[3] == pytest.approx(28 / 3)
    assert mixed(late, 51, 0, 4, 8, 16)[0] == 8
    assert [params.at("alpha", r) for r in (50, 51, 100)] == [0.99, 0.5, 0.99]


def test_first_stage_is_plain_averaging_then_mixing_begins():
    method = begun(3, first_stage=2, selection="in_order", alpha=0.75)
    assert mixed(method, 2, 1, 5, 9) == [5, 5, 5]
    assert mixed(method, 3, 1, 5, 9) == [2, 6, 7]  # r = 2, offset 2 mod 2 + 1 = 1


# ---- selections and similarities ----------------------------------------------------------------------------------

MODELS = ([3, 0], [2, 2], [0, 1], [-4, 1])


@pytest.mark.parametrize(
    ("similarity", "partner_of_0"),
    [
        # With a = (3,0): b = (2,2), c = (0,1), e = (-4,1). Least similar to a:
        # cosine: b .71, c 0, e -.97 -> e. paper <x,y>/(|x|+|y|): 6/5.83, 0, -12/7.12 -> e.
        ("cosine", 3), ("paper", 3),
        # euclidean |a-b| = 2.24, |a-c| = 3.16, |a-e| = 7.07 -> e; manhattan 3, 4, 8 -> e.
        ("euclidean", 3), ("manhattan", 3),
        # chunked has one entry, w: the cosine.
        ("chunked", 3),
    ],
)  # fmt: skip
def test_lowest_similarity_under_every_measure(similarity, partner_of_0):
    method = begun(4, d=2, similarity=similarity, alpha=0.5)
    aggregate(method, 1, uploads(*MODELS))
    assert method.pool.rows[0].tolist() == ((np.array(MODELS[0]) + MODELS[partner_of_0]) / 2).tolist()


@pytest.mark.parametrize("similarity", ["cosine", "paper", "euclidean", "manhattan", "chunked"])
def test_members_are_compared_by_their_own_rows(similarity):
    """Slot 0 is lost and keeps (0, 0); slots 1 to 3 hold a = (1, 0), b = (1, 1), c = (-1, 0).

    Least similar: a and b take c, c takes a under every measure (cosines: a b .71, a c -1, b c -.71; distances 1, 2,
    sqrt 5, so b and c are farther apart there: c takes b). Row 0 counts in nothing. alpha .5 gives midpoints.
    """
    method = begun(4, d=2, similarity=similarity, alpha=0.5)
    aggregate(method, 1, uploads([1, 0], [1, 1], [-1, 0], slots=[1, 2, 3]))
    last = [0, 0.5] if similarity in ("euclidean", "manhattan") else [0, 0]
    assert method.pool.rows.tolist() == [[0, 0], [0, 0], [0, 0.5], last]


def test_measures_differ_where_they_should():
    # Most similar to a = (1,0) of b = (9,1) and c = (1,.5). cosine: .994, .894 -> b. euclidean: 8.06, .5 -> c.
    # paper: 9/10.06, 1/2.12 -> b.
    models = ([1, 0], [9, 1], [1, 0.5])
    for similarity, partner in (("cosine", 1), ("paper", 1), ("euclidean", 2), ("manhattan", 2)):
        method = begun(3, d=2, selection="highest_similarity", similarity=similarity, alpha=0.5)
        aggregate(method, 1, uploads(*models))
        assert method.pool.rows[0].tolist() == ((np.array(models[0]) + models[partner]) / 2).tolist(), similarity


def test_similarity_over_the_state_sees_the_buffers():
    # Parameters say that c = (-1) is least like a = (1); with running means 9, -9, 9 it is b = (1).
    values = {"models": ([1], [1], [-1]), "means": ([9], [-9], [9])}
    for part, partner in (("parameters", 2), ("state", 1)):
        method = begun(3, buffers=1, part=part, alpha=0.5)
        aggregate(method, 1, uploads(*values["models"], means=values["means"]))
        assert method.pool.model(0)["mean"].tolist() == [(9 + values["means"][partner][0]) / 2]


@pytest.mark.slow
@pytest.mark.parametrize("selection", ["random", "least_similar_derangement", "in_order"])
@settings(deadline=None)
@given(st.integers(2, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_permutations_keep_mean_and_the_identity_of_squares(selection, k, number, seed):
    """Sum |w - x|^2 = sum |v - x|^2 - a (1 - a) sum |v_i - v_co(i)|^2 for every x; here x = 0 and a = .5, where
    |v_i - v_co(i)| = 2 |w_i - v_i|."""
    models = np.random.default_rng(seed).normal(size=(k, 3)).astype(np.float32)
    method = begun(k, d=3, selection=selection, alpha=0.5)
    aggregate(method, number, uploads(*models))
    v, w = models.astype(np.float64), method.pool.rows.astype(np.float64)
    np.testing.assert_allclose(w.mean(0), v.mean(0), atol=1e-6)
    distances = (2 * (w - v)) ** 2
    assert (w**2).sum() == pytest.approx((v**2).sum() - 0.25 * distances.sum(), rel=1e-5, abs=1e-6)


def test_least_similar_derangement_chooses_everyone_once():
    # Lowest similarity lets a, b, c all choose e; the derangement of least total cosine may not.
    method = begun(4, d=2, selection="least_similar_derangement", alpha=0.5)
    aggregate(method, 1, uploads(*MODELS))
    chosen = {tuple(2 * row - np.array(own)) for row, own in zip(method.pool.rows, MODELS)}
    assert chosen == {tuple(map(float, model)) for model in MODELS}


# ---- global model --------------------------------------------------------------------------------------------------


def test_the_mean_of_the_uploads_is_the_global_model_of_the_public_code():
    # Lowest similarity, alpha .5: a=(1,0), b=(1,1), c=(-1,0). a and b take c, c takes a: (0,0), (0,.5), (0,0), mean
    # (0, 1/6). Mean of the uploads (1/3, 1/3).
    models = ([1, 0], [1, 1], [-1, 0])
    paper, code = (begun(3, d=2, alpha=0.5, global_model=name) for name in ("mixed", "uploads"))
    assert code.global_model()["w"].tolist() == [0, 0]
    for method in (paper, code):
        aggregate(method, 1, uploads(*models))
    np.testing.assert_allclose(paper.global_model()["w"], [0, 1 / 6], atol=1e-7)
    np.testing.assert_allclose(code.global_model()["w"], [1 / 3, 1 / 3], atol=1e-7)
    assert same(paper.pool.model(1), code.pool.model(1))


def test_the_mean_of_the_uploads_leaves_a_lost_slot_out():
    # Slot 1 of 3 is lost and keeps 0: the mean of the two uploads 2 and 4 is 3, that of the pool would be 2.
    method = begun(3, global_model="uploads", alpha=1.0)
    aggregate(method, 1, uploads([2], [4], slots=[0, 2]))
    assert method.global_model()["w"].tolist() == [3]
    assert method.pool.mean()["w"].tolist() == [2]


# ---- more models than clients ---------------------------------------------------------------------------------------


def slots_of(method, number, clients):
    return [payload.slot for payload in method.dispatch(Round(number, 0, tuple(range(clients)), 0))]


def test_the_least_recently_trained_slots_go_out():
    # K=5, three clients: 0 1 2, then the two that wait and the one that waited longest, and so on round.
    method = begun(3, k=5, selection="in_order", alpha=0.9)
    seen = []
    for number in range(1, 6):
        slots = slots_of(method, number, 3)
        seen.append(slots)
        aggregate(method, number, uploads([1], [1], [1], slots=slots))
    assert seen == [[0, 1, 2], [0, 3, 4], [1, 2, 3], [0, 1, 4], [2, 3, 4]]


def test_a_lost_slot_stays_due():
    method = begun(2, k=4)
    assert slots_of(method, 1, 2) == [0, 1]
    aggregate(method, 1, uploads([1], slots=[0]))
    assert slots_of(method, 2, 2) == [1, 2]


def test_waiting_slots_are_not_mixed():
    method = begun(2, k=4, selection="in_order", alpha=0.75)
    aggregate(method, 1, uploads([4], [8], slots=[0, 1]))
    assert method.pool.rows[:, 0].tolist() == [5, 7, 0, 0]


@pytest.mark.slow
def test_five_models_and_three_clients(tmp_path):
    wanted = ("method.k=5", "clients_per_round=3", "partition.clients=3")
    finished = run(tmp_path / "a", *wanted).driver
    assert len(finished.state.pool) == 5
    assert finished.state.queue == [4, 0, 1, 2, 3]
    run(tmp_path / "b", *wanted, "rounds=2")
    resumed = run(tmp_path / "b", *wanted, f"resume={tmp_path / 'b'}").driver
    assert same(finished.global_model(), resumed.global_model())
    assert finished.state.queue == resumed.state.queue


# ---- another number of models ---------------------------------------------------------------------------------------


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_a_resumed_pool_of_another_size_keeps_the_mean(before, after, seed):
    method = begun(before, d=3, alpha=0.9)
    aggregate(method, 1, uploads(*np.random.default_rng(seed).normal(size=(before, 3))))
    other = begun(after, d=3, alpha=0.9)
    other.resume(method.checkpoint())
    assert slots_of(other, 2, after) == list(range(after))
    np.testing.assert_allclose(other.global_model()["w"], method.global_model()["w"], atol=1e-6)
    assert sorted(other.queue) == list(range(after))


def after_round_1(first, later):
    """Return a schedule of K."""
    return {"schedule": "staged", "stages": [{"until": 1, "value": first}, {"value": later}]}


def test_new_models_are_copies_of_the_mean_and_go_out_first():
    method = begun(2, k=after_round_1(2, 3), selection="in_order", alpha=1.0)
    mixed(method, 1, 2, 4)
    assert slots_of(method, 2, 1) == [2]
    assert method.pool.rows[:, 0].tolist() == [2, 4, 3]


def test_survivors_are_shifted_to_the_old_mean():
    # 2, 4, 9: mean 5. Two stay: 2, 4 with mean 3, shifted by 2.
    method = begun(2, k=after_round_1(3, 2), alpha=1.0)
    mixed(method, 1, 2, 4, 9)
    assert slots_of(method, 2, 2) == [0, 1]
    assert method.pool.rows[:, 0].tolist() == [4, 6]


@pytest.mark.slow
def test_resume_with_another_k_continues_from_the_same_mean(tmp_path):
    first = run(tmp_path, "rounds=1", "method.alpha=0.9")
    mean = first.driver.global_model()
    grown = session(tmp_path, "rounds=2", "method.alpha=0.9", "clients_per_round=5", f"resume={tmp_path}")
    assert same(grown.driver.global_model(), mean)
    grown.execute()
    assert len(grown.driver.state.pool) == 5
    with pytest.raises(ConfigError, match=r"^method\.alpha"):
        session(tmp_path, "rounds=3", "method.alpha=0.8", "method.k=7", f"resume={tmp_path}")


# ---- configuration, diagnostics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("method.k=3", "method.k"),
        ("method.k=10.5", "whole number"),
        ("method.k=0", "whole number"),
        ("method.alpha={schedule: linear, start: 0.2, end: 0.99, rounds: 5}", "0.2"),
        ("method.selection=lowest", "method.selection"),
        ("method.mode=propeller", "method.mode"),
        ("method.propellers=0", "method.propellers"),
    ],
)
def test_faults_of_the_configuration(override, word):
    with pytest.raises(ConfigError) as caught:
        load((override,))
    assert word in str(caught.value)


def test_propellers_leave_the_own_model_a_share():
    # Two propellers of .5 leave the own model 0.
    stages = [{"until": 1, "value": "propellers"}, {"value": "cross"}]
    with pytest.raises(ConfigError, match="propeller_weighting"):
        begun(3, mode={"schedule": "staged", "stages": stages}, propeller_weighting="each", alpha=0.5)


@pytest.mark.parametrize("selection", ["in_order", "lowest_similarity"])
def test_diagnostics_of_the_mixed_pool(selection):
    # Models (1,0), (0,1), alpha .5: both become (.5,.5): similarity 1, spread 0. The Gram matrix is from before.
    method = begun(2, d=2, selection=selection, alpha=0.5)
    seen = aggregate(method, 1, uploads([1, 0], [0, 1]))
    seen = {name: value for name, value in seen.items() if name.startswith("pool")}
    assert seen == {"pool_similarity_mean": pytest.approx(1), "pool_spread": pytest.approx(0)}


def test_diagnostics_only_when_due_or_at_hand():
    def measured(number, **values):
        method = begun(2, d=2, diagnostics_every=3, **values)
        return "pool_spread" in aggregate(method, number, uploads([1, 0], [0, 1]))

    assert [measured(r, selection="in_order") for r in range(1, 7)] == [False, False, True, False, False, True]
    assert measured(1, selection="lowest_similarity")
    assert not measured(1, selection="lowest_similarity", similarity="manhattan")
