"""The analyses of models, end to end on a tiny real run, and their arithmetic by hand."""

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from fedcross.analysis import cka, forgetting, gradcam, tsne
from fedcross.analysis.subject import Options, Subject
from fedcross.core.errors import DataError
from fedcross.server.launch import launch
from tests.support.command import subcommand

main = subcommand("analyse")

PNG = b"\x89PNG"
SETTINGS = [
    "task=digits", "task.limit=150", "task.limit_test=60", "partition.clients=3", "clients_per_round=3",
    "partition.min_size=5", "train.epochs=1", "train.batch=32", "logger=none", "rounds=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, digits_cache: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_STATE", str(folder / "states"))
        patch.setenv("FEDCROSS_CACHE", str(digits_cache))
        return {
            "fedct": launch([*SETTINGS, "method=fedct", "model=resnet20", "snapshots.rounds=[1,2]"], folder / "fedct"),
            "fedavg": launch([*SETTINGS, "method=fedavg", "snapshots.rounds=[2]"], folder / "fedavg"),
            "bare": launch([*SETTINGS, "method=fedavg", "rounds=1"], folder / "bare"),
        }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["cka", "tsne", "forgetting", "gradcam"])
def test_every_analysis_writes_its_picture(runs, tmp_path, capsys, kind):
    command = [str(runs["fedct"]), kind, "--out", str(tmp_path), "--examples", "40", "--rounds", "2", "--slots", "1"]
    assert main([*command, "--images", "0", "3"]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert written[0] == tmp_path / f"{kind}.png"
    assert written[0].read_bytes().startswith(PNG)
    assert all(path.is_file() for path in written)


@pytest.mark.slow
def test_a_run_with_one_exchange_has_cka_and_tsne_but_no_forgetting(runs, tmp_path, capsys):
    for kind in ("cka", "tsne"):
        assert main([str(runs["fedavg"]), kind, "--out", str(tmp_path), "--examples", "20"]) == 0
    assert main([str(runs["fedavg"]), "forgetting", "--out", str(tmp_path)]) == 2
    assert "needs a cross-training method" in capsys.readouterr().err
    assert main([str(runs["fedavg"]), "gradcam", "--out", str(tmp_path)]) == 2
    assert "no convolution" in capsys.readouterr().err


def test_what_is_missing_is_named(runs, tmp_path, capsys):
    assert main([str(runs["bare"]), "cka", "--out", str(tmp_path)]) == 2
    assert "no snapshots. Run it with snapshots.rounds" in capsys.readouterr().err
    assert main([str(runs["fedct"]), "cka", "--rounds", "7", "--out", str(tmp_path)]) == 2
    assert "no snapshot of round [7]. There are [1, 2]" in capsys.readouterr().err
    assert main([str(tmp_path), "cka"]) == 2
    assert "no .hydra/config.yaml" in capsys.readouterr().err
    assert main([str(runs["fedct"]), "gradcam", "--images", "999", "--out", str(tmp_path)]) == 2
    assert "the test set has images 0 to 59" in capsys.readouterr().err


def test_snapshots_hold_what_the_round_did(runs):
    subject = Subject(runs["fedct"])
    assert subject.rounds() == [1, 2]
    home, host = subject.exchanges(2)
    assert (home.exchange, host.exchange) == (0, 1)
    assert list(home.models) == list(host.models) == [0, 1, 2]
    assert all(home.clients[slot] != host.clients[slot] for slot in home.models)
    # Phase IV of FedCT: the global model is the mean of the hosts' uploads by the examples of the homes.
    sizes = {slot: len(subject.partition.train[client]) for slot, client in home.clients.items()}
    expected = sum(sizes[slot] * host.models[slot]["classifier.weight"].astype(np.float64) for slot in sizes)
    found = subject.global_model(2)["classifier.weight"]
    np.testing.assert_allclose(found, expected / sum(sizes.values()), rtol=1e-4, atol=1e-7)


def test_weights_of_another_network_are_refused(runs):
    with pytest.raises(DataError, match="do not fit model resnet20"):
        Subject(runs["fedct"]).network({"w": np.zeros(1)})


# ---- CKA ----------------------------------------------------------------------------------------------------------


def test_linear_cka_by_hand():
    # Centred columns x = (1, -1, 0), y = (1, 0, -1): Gram matrices x x', y y' of norm 2 each;
    # <x x', y y'> = (x . y)^2 = 1, so CKA = 1 / (2 * 2).
    x = np.array([[1.0], [-1.0], [0.0]])
    y = np.array([[1.0], [0.0], [-1.0]])
    assert cka.linear_cka(cka.gram(x), cka.gram(y)) == pytest.approx(0.25)


def test_linear_cka_ignores_rotation_scale_and_offset():
    x = np.random.Generator(np.random.Philox(1)).normal(size=(20, 3))
    rotation, _ = np.linalg.qr(np.random.Generator(np.random.Philox(2)).normal(size=(3, 3)))
    assert cka.linear_cka(cka.gram(x), cka.gram(5 * x @ rotation + 7)) == pytest.approx(1.0)
    assert cka.linear_cka(cka.gram(x), cka.gram(np.ones((20, 4)))) == 0.0


def test_layers_are_recorded_in_forward_order():
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 4))
    found = cka.layers(model, torch.ones(5, 3))
    assert {name: values.shape for name, values in found.items()} == {"0": (5, 2), "2": (5, 4)}
    np.testing.assert_allclose(found["2"], model(torch.ones(5, 3)).detach().numpy())


def test_the_table_of_cka_is_the_mean_over_models_and_pairs():
    same = np.array([[0.2], [0.6]])
    before, after = np.array([[[1.0, 0.3], [0.3, 1.0]]]), np.array([[[1.0, 0.5], [0.5, 1.0]]])
    rows = cka.Similarity(4, ["fc"], same, before, after).rows()
    assert [(row[2], row[3]) for row in rows] == [
        ("clients before", pytest.approx(0.3)),
        ("clients after", pytest.approx(0.5)),
        ("same model", pytest.approx(0.4)),
    ]


# ---- forgetting, t-SNE, Grad-CAM ----------------------------------------------------------------------------------


def test_change_is_told_apart_by_who_holds_the_class():
    # One model, four classes: 0 held at home only (0.8 -> 0.2), 1 at the host only (0 -> 0.5), 2 at both (0.5 -> 0.6),
    # 3 at neither, and without test examples.
    one = forgetting.Change(
        1,
        [0],
        np.array([[0.8, 0.0, 0.5, np.nan]]),
        np.array([[0.2, 0.5, 0.6, np.nan]]),
        np.array([[True, False, True, False]]),
        np.array([[False, True, True, False]]),
    )
    found = one.summary()
    assert found["home only"] == pytest.approx(-0.6)
    assert found["host only"] == pytest.approx(0.5)
    assert found["both"] == pytest.approx(0.1)
    assert np.isnan(found["neither"])


def test_accuracy_per_class_agrees_with_counting(runs):
    subject = Subject(runs["fedct"])
    indices = subject.sample(60)
    arrays = subject.global_model(2)
    with torch.no_grad():
        guesses = subject.network(arrays)(subject.inputs(indices)).argmax(1).numpy()
    labels = subject.task.test.y[indices]
    expected = [(guesses[labels == k] == k).mean() for k in range(10)]
    np.testing.assert_allclose(forgetting.per_class(subject, arrays, indices), expected)


@pytest.mark.slow
def test_the_forgetting_table_has_a_line_per_model_and_class(runs, tmp_path):
    _, table = forgetting.draw(Subject(runs["fedct"]), Options(rounds=(1,), examples=30), tmp_path)
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 3 * 10
    assert all(0 <= float(row["before"]) <= 1 for row in rows)


def test_test_examples_are_balanced_and_repeatable(runs):
    subject = Subject(runs["fedct"])
    indices = subject.sample(10)
    assert np.bincount(subject.task.test.y[indices], minlength=10).tolist() == [1] * 10
    assert (indices == Subject(runs["fedct"]).sample(10)).all()


def test_neighbours_of_separated_classes_are_their_own():
    points = np.array([[0.0, 0.0], [0.1, 0.0], [0.0, 0.1], [9.0, 9.0], [9.1, 9.0], [9.0, 9.1]])
    assert tsne.neighbours(points, np.array([0, 0, 0, 1, 1, 1]), 2) == 1.0
    assert tsne.neighbours(points, np.array([0, 1, 0, 1, 0, 1]), 2) == pytest.approx(1 / 3)  # 4 of 12 neighbours


@pytest.mark.slow
def test_the_map_repeats_with_its_seed():
    x = np.random.Generator(np.random.Philox(1)).normal(size=(12, 5)).astype(np.float32)
    assert (tsne.embed(x, 1) == tsne.embed(x, 1)).all()


def test_heat_maps_have_the_size_of_the_image(runs):
    subject = Subject(runs["fedct"])
    heat, guesses = gradcam.maps(subject, subject.global_model(2), np.array([0, 1]))
    assert heat.shape == (2, 8, 8)
    assert heat.min() >= 0
    assert heat.max() <= 1
    assert len(guesses) == 2
    assert gradcam.pictures(subject, np.array([0, 1])).shape == (2, 8, 8, 3)
