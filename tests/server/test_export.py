"""Models of a run for use elsewhere."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import fedcross
from fedcross.core.errors import StorageError
from fedcross.server.export import export, network, notes
from fedcross.tasks import digits
from tests.support.command import subcommand
from tests.support.slices import THREE

SMALL = ["task=digits", "task.limit=200", "task.limit_test=50", "partition=iid", "partition.clients=4"]
SMALL += ["clients_per_round=2", "train.epochs=1", "logger=none", "engine.workers=1", "rounds=3", "checkpoint.keep=5"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return fedcross.run(*SMALL, f"output={tmp_path_factory.mktemp('runs') / 'one'}").folder


def test_the_newest_global_model_is_the_final_one(run, tmp_path):
    path = export(run, out=tmp_path / "m.safetensors")
    final, found = load_file(run / "model.safetensors"), load_file(path)
    assert found.keys() == final.keys()
    assert all((found[name] == final[name]).all() for name in final)


def test_rounds_and_middleware_models(run):
    first, one, two = export(run, 1), export(run, model=0), export(run, model=1)
    assert first.name == "model-round-000001.safetensors"
    assert two.name == "model-round-000003-1.safetensors"
    models = [load_file(path) for path in (one, two)]
    mean = {name: np.mean([m[name] for m in models], axis=0) for name in models[0]}
    final = load_file(run / "model.safetensors")
    assert all(np.allclose(mean[name], final[name], atol=1e-6) for name in final)
    assert any((array != final[name]).any() for name, array in load_file(first).items())  # not the newest round's
    for wrong, words in (
        ({"number": 9}, "round 1, 2, 3"),
        ({"model": 2}, "models 0 to 1"),
        ({"width": 0.5}, "one width"),
    ):
        with pytest.raises(StorageError, match=words):
            export(run, **wrong)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_a_network_as_a_file_computes_the_same_scores_and_names_its_classes(run, tmp_path, kind):
    path = export(run, kind=kind, out=tmp_path / "net")
    model, batch = network(run), torch.rand(7, 1, 8, 8)
    if kind == "onnx":
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(None, {"inputs": batch.numpy()})[0])
        notes = session.get_modelmeta().custom_metadata_map
    else:
        extra = {"fedcross.json": ""}
        found = torch.jit.load(path, _extra_files=extra)(batch)
        notes = json.loads(extra["fedcross.json"])
    assert torch.allclose(found, model(batch), atol=1e-4)
    assert json.loads(notes["number_of_classes"]) == 10
    assert json.loads(notes["shape"]) == [1, 8, 8]


def test_a_middleware_model_of_a_run_with_widths_has_its_slot_s_width(tmp_path):
    settings = [*SMALL, "method.widths=[1.0,0.5]", "rounds=1"]
    run = fedcross.run(*settings, f"output={tmp_path / 'run'}").folder
    sizes = [sum(a.size for a in load_file(export(run, model=slot)).values()) for slot in (0, 1)]
    assert min(sizes) < max(sizes)


@pytest.mark.slow
def test_a_narrow_model_of_a_run_with_widths(tmp_path):
    settings = [*SMALL, *THREE, "method=adaptivefl", "rounds=1"]
    run = fedcross.run(*settings, f"output={tmp_path / 'run'}")
    widths = list(run.result["width_accuracy"])
    narrow = load_file(export(run.folder, width=0.4))  # of 0.4@1 and 0.4 the second
    full = load_file(run.folder / "model.safetensors")
    assert sum(a.size for a in narrow.values()) < sum(a.size for a in full.values())
    assert sum(t.numel() for t in run.slice(widths[-1]).state_dict().values()) == sum(a.size for a in narrow.values())
    wider = load_file(export(run.folder, width="0.4@1"))
    assert sum(a.size for a in narrow.values()) < sum(a.size for a in wider.values())
    with pytest.raises(StorageError, match=widths[0]):
        export(run.folder, width=0.123)


def test_the_command(run, tmp_path, capsys):
    assert subcommand("export")([str(run), "--out", str(tmp_path / "m.safetensors")]) == 0
    out, err = capsys.readouterr()
    assert out.strip() == str(tmp_path / "m.safetensors")
    assert "load_file" in err


def test_a_file_says_how_raw_pictures_become_inputs():
    """Digits have values 0 to 16: a program elsewhere needs scale, mean and deviation as numbers."""
    found = notes(digits.load(digits.Params(mean=(0.25,), std=(0.5,))))
    assert [json.loads(found[name]) for name in ("scale", "mean", "std")] == [16, [0.25], [0.5]]
    assert (found["task"], found["inputs"]) == ("digits", "float32")
