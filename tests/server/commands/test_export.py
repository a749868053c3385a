import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedcross.core.errors import StorageError
from fedcross.server.checkpoint import Checkpoints
from fedcross.server.commands.export import export
from tests.support.command import subcommand
from tests.support.federation import run, same, session

main = subcommand("export")


def numbers(path):
    return {name: tensor.numpy() for name, tensor in load_file(path).items()}


def sorted_by_name(arrays):
    return dict(sorted(arrays.items()))


@pytest.fixture(scope="module")
def finished(tmp_path_factory, digits_cache):
    """A run of three rounds over the federation of tests, and its folder."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_STATE", str(folder / "clients"))
        patch.setenv("FEDCROSS_CACHE", str(digits_cache))
        return folder, run(folder, "method=fedcross_propellers", "method.k=4")


def test_the_newest_global_model_is_the_runs_own(finished, tmp_path):
    folder, _ = finished
    assert same(numbers(export(folder)), numbers(folder / "model.safetensors"))
    assert (folder / "model-round-000003.safetensors").exists()


def test_a_middleware_model_of_an_older_round_loads_with_plain_torch(finished, tmp_path):
    folder, ready = finished
    out = export(folder, number=2, model=3, out=tmp_path / "deep" / "model.safetensors")
    network = ready.evaluator.model
    network.load_state_dict(load_file(out))
    stored = Checkpoints(folder).load(2)[0].arrays["pool.rows"][3]
    flat = torch.cat([p.detach().reshape(-1).cpu() for p in network.state_dict().values()]).numpy()
    assert (flat == stored).all()
    last = sorted_by_name(ready.method.pool.model(3))
    assert same(numbers(export(folder, model=3, out=tmp_path / "last")), last)


def test_a_run_in_progress_and_another_method(tmp_path):
    ready = session(tmp_path / "run", "method=fedavg")
    real, seen = ready._round, []

    def watched(number):
        if number == 3:
            path = export(tmp_path / "run", out=tmp_path / "two.safetensors")
            seen.append(same(numbers(path), sorted_by_name(ready.method.global_model())))
        return real(number)

    ready._round = watched
    ready.execute()
    assert seen == [True]
    with pytest.raises(StorageError, match="FedAvg keeps one model"):
        export(tmp_path / "run", model=0)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"number": 1}, ["--round 1", "only of round 2, 3"]),
        ({"model": 4}, ["--model 4", "models 0 to 3"]),
        ({"model": -1}, ["--model -1", "models 0 to 3"]),
    ],
)
def test_what_is_not_there_is_told_with_what_is(finished, asked, words):
    with pytest.raises(StorageError) as caught:
        export(finished[0], **asked)
    assert all(word in str(caught.value) for word in words)


def test_no_run_and_no_checkpoint(tmp_path):
    with pytest.raises(StorageError, match="no such run folder"):
        export(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="no checkpoint here"):
        export(tmp_path)


def test_a_damaged_newest_checkpoint_gives_the_one_before(finished, tmp_path):
    folder, _ = finished
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for path in (folder / "checkpoints").iterdir():
        (checkpoints / path.name).write_bytes(path.read_bytes()[: None if "2" in path.name else -9])
    assert export(tmp_path).name == "model-round-000002.safetensors"


def test_the_command(finished, tmp_path, capsys):
    out = tmp_path / "m.safetensors"
    assert main([str(finished[0]), "--round", "3", "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    assert np.isfinite(next(iter(numbers(out).values()))).all()
    assert main([str(finished[0]), "--round", "9"]) == 2
    assert "only of round 2, 3" in capsys.readouterr().err
