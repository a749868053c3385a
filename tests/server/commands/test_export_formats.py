"""ONNX, TorchScript and safetensors hold the same model, for every size of batch."""

from __future__ import annotations

import json
import warnings

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fedcross.core.errors import ConfigError, DataError, StorageError
from fedcross.server.commands import formats
from fedcross.server.commands.export import export, network
from fedcross.server.commands.export_notes import notes
from fedcross.server.launch import launch
from fedcross.tasks import arrays, folder
from fedcross.tasks.data import forget
from tests.support import warm
from tests.support.command import subcommand

main = subcommand("export")
SMALL = (
    "partition.clients=2", "partition=iid", "clients_per_round=2", "rounds=1", "train.epochs=1", "logger=none",
    "engine.workers=1", "device=cpu",
)  # fmt: skip
BERT = (
    "model=transformers:BertForSequenceClassification", "model.hidden_size=8", "model.num_hidden_layers=1",
    "model.num_attention_heads=2", "model.intermediate_size=8", "model.max_position_embeddings=25",
    "model.lora={r: 2, target_modules: [query]}", "train.only='*lora_*'",
)  # fmt: skip


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with a few tweets in LEAF's form."""
    root = tmp_path_factory.mktemp("data")
    rng = np.random.default_rng(1)
    words = ["good", "bad", "day", "rain", "sun", "work"]
    users = [f"u{i}" for i in range(6)]
    said = {
        user: {
            "x": [["1", "", "", user, " ".join(rng.choice(words, 6)), ""] for _ in range(8)],
            "y": [int(y) for y in rng.integers(0, 2, 8)],
        }
        for user in users
    }
    folder = root / "sent140" / "data"
    folder.mkdir(parents=True)
    (folder / "all_data.json").write_text(json.dumps({"users": users, "num_samples": [8] * 6, "user_data": said}))
    return root


def done(tmp_path, texts, *overrides):
    data = ("task=sent140", f"data_root={texts}") if "text" in overrides else ("task=digits", "task.limit=100")
    return launch([*data, *SMALL, *(o for o in overrides if o != "text")], tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["model=mlp", "method=fedcross"], id="mlp"),
        pytest.param(["model=resnet20", "method=fedcross"], id="batch-norm", marks=pytest.mark.slow),
        pytest.param(["text", "model=lstm_sent140", "model.hidden=8"], id="lstm", marks=pytest.mark.slow),
        pytest.param(["text", *BERT], id="bert-with-adapters", marks=pytest.mark.slow),
    ],
)
def test_the_three_formats_agree(tmp_path, texts, monkeypatch, digits_cache, overrides):
    monkeypatch.setenv("FEDCROSS_CACHE", str(digits_cache if "text" not in overrides else tmp_path / "cache"))
    run = done(tmp_path, texts, *overrides)
    root = str(texts) if "text" in overrides else None
    plain = network(run, root)
    weights = export(run)
    plain.load_state_dict(load_file(weights))
    onnx = onnxruntime.InferenceSession(str(export(run, kind="onnx", data_root=root)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.", category=FutureWarning)
        extra = {"fedcross.json": ""}
        script = torch.jit.load(export(run, kind="torchscript", data_root=root), _extra_files=extra)
    generator = torch.Generator().manual_seed(2)
    if root is None:
        said = onnx.get_modelmeta().custom_metadata_map
        assert (said["task"], said["shape"], said["scale"]) == ("digits", "[1, 8, 8]", "16.0")
        assert json.loads(extra["fedcross.json"]) == said
    for size in (1, 3, 17):
        if root:
            inputs = torch.randint(0, 6, (size, 25), generator=generator)
        else:
            inputs = torch.rand((size, 1, 8, 8), generator=generator)
        with torch.no_grad():
            expected = plain(inputs)
            torch.testing.assert_close(script(inputs), expected, rtol=0, atol=1e-5)
        (found,) = onnx.run(None, {"inputs": inputs.numpy()})
        np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=1e-5)
    assert len(expected) == 17


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits_cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_CACHE", str(digits_cache))
        return done(tmp_path_factory.mktemp("finished"), None, "model=mlp", "method=fedcross", "method.k=3")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "torchscript", "safetensors"])
def test_the_printed_lines_run(finished, tmp_path, capsys, monkeypatch, kind):
    monkeypatch.setattr("logging.raiseExceptions", False)  # handlers of earlier tests' output complain on stderr
    out = tmp_path / f"net.{kind}"
    assert main([str(finished), "--format", kind, "--out", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out.strip() == str(out)
    done = warm.run(["-c", said.err])
    assert done.returncode == 0, done.stderr
    assert kind == "safetensors" or "(1, 10)" in done.stdout.replace("torch.Size([1, 10])", "(1, 10)")


def test_a_middleware_model_and_the_default_name(finished):
    path = export(finished, model=1, kind="torchscript")
    assert path.name == "model-round-000001-1.pt"
    with pytest.raises(StorageError, match="models 0 to 2"):
        export(finished, model=3, kind="torchscript")


@pytest.mark.slow
@pytest.mark.parametrize("told", [True, False], ids=["settings", "nothing"])
def test_a_deployments_network_needs_nobodys_data(tmp_path, told):
    """Shape and classes stand in the settings; the data are on another machine."""
    data = tmp_path / "data"
    data.mkdir()
    draws = np.random.default_rng(0)
    np.savez(data / "data.npz", x=draws.random((40, 1, 4, 4), np.float32), y=np.arange(40) % 3)
    settings = ["task.classes=3", "task.shape=[1,4,4]"] if told else []
    run = launch(["task=arrays", f"data_root={data}", *settings, *SMALL, "model=mlp"], tmp_path / "run")
    expected = network(run)
    data.rename(tmp_path / "elsewhere")
    forget()
    if not told:
        with pytest.raises(DataError, match=r"data\.npz"):
            export(run, kind="onnx")
        return
    inputs = torch.rand((5, 1, 4, 4))
    (found,) = onnxruntime.InferenceSession(str(export(run, kind="onnx"))).run(None, {"inputs": inputs.numpy()})
    with torch.no_grad():
        np.testing.assert_allclose(found, expected(inputs).numpy(), rtol=0, atol=1e-5)


def test_settings_say_what_data_would(tmp_path):
    """The task without examples has the inputs and labels of the one with them, as far as the settings tell."""
    assert arrays.outline(arrays.Params(root=tmp_path, classes=3)) is None
    words = arrays.outline(arrays.Params(root=tmp_path, classes=3, shape=(7,), vocabulary=9))
    assert (words.shape, words.classes, words.vocabulary, len(words.test)) == ((7,), 3, 9, 0)
    assert words.prepare(words.test.x).dtype == torch.int64
    said = notes(arrays.outline(arrays.Params(root=tmp_path, classes=3, shape=(7,))))
    assert (said["shape"], said["number_of_classes"], "scale" in said) == ("[7]", "3", False)
    (tmp_path / "data.npz").touch()
    assert arrays.outline(arrays.Params(root=tmp_path, classes=3, shape=(7,))) is None  # whatever is in it
    assert folder.outline(folder.Params(root=tmp_path / "none")) is None
    assert folder.outline(folder.Params(root=tmp_path, classes=("a", "b"))) is None
    pictures = folder.outline(folder.Params(root=tmp_path / "none", classes=("a", "b"), size=8))
    assert (pictures.shape, notes(pictures)["classes"], notes(pictures)["scale"]) == ((3, 8, 8), '["a", "b"]', "255.0")


class Decides(nn.Module):
    """Takes a path that depends on the inputs, which a trace cannot keep."""

    def forward(self, x):
        return x * 2 if len(x) == 2 else x * 3


def test_a_file_that_gives_other_scores_is_not_left(tmp_path):
    (tmp_path / "x.pt").write_bytes(b"an earlier one")
    with pytest.raises(StorageError, match="for 5 examples the file's scores are off by"):
        formats.write("torchscript", Decides(), lambda n: torch.ones(n, 3), tmp_path / "x.pt", {})
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("x.pt", b"an earlier one")]


@pytest.mark.parametrize("kind", ["torchscript", "onnx"])
def test_a_full_disk_is_an_error_and_leaves_an_earlier_file(tmp_path, kind):
    """The process is one of its own: torch would end it."""
    path = tmp_path / "net"
    path.write_bytes(b"an earlier one")
    code = f"""
import errno, torch
from pathlib import Path
from fedcross.server.commands.formats import write
from tests.support.disk import largest_file
network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
try:
    with largest_file(300):  # it stands for the disk
        write({kind!r}, network, lambda n: torch.ones(n, 1, 8, 8), Path({str(path)!r}), {{}})
except OSError as error:
    assert error.errno == errno.EFBIG
    print("told")
"""
    done = warm.run(["-c", code])
    assert (done.returncode, done.stdout.strip()) == (0, "told"), done.stderr
    assert path.read_bytes() == b"an earlier one"


class Foreign(nn.Module):
    def forward(self, x):
        return torch.from_numpy(np.sort(x.numpy()))


@pytest.mark.slow
def test_a_network_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match=r"--format onnx: the exporter of torch cannot write this network"):
        formats.write("onnx", Foreign(), lambda n: torch.ones(n, 3), tmp_path / "x.onnx", {})
