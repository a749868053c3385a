"""Networks rebuilt from a run folder."""

from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from fedcross.analysis.subject import Subject
from fedcross.core.errors import DataError
from fedcross.server.launch import record
from tests.support.federation import SMALL, run


@pytest.mark.parametrize("method", ["fedavg", "fedfusion_multi"])
def test_final_model_loads_as_it_was_evaluated(tmp_path: Path, method: str):
    overrides = [f"method={method}", "model=fedfusion_mnist", "rounds=1", "task.limit=60"]
    session = run(tmp_path, *overrides)
    record(tmp_path, [*SMALL, *overrides])
    subject = Subject(tmp_path)
    arrays = load_file(tmp_path / "model.safetensors")
    rebuilt = subject.network(arrays)
    # FedFusion's file holds the previous round's extractor too, and the rebuilt network uses it.
    assert any("reference" in name for name in arrays) == (method != "fedavg")
    x = subject.task.prepare(subject.task.test.x[:5])
    with torch.no_grad():
        assert torch.equal(rebuilt(x), session.evaluator.model.eval()(x))
    # What travels (a client's model) loads as well.
    assert torch.isfinite(subject.network(session.method.global_model())(x)).all()


@pytest.mark.parametrize(
    ("error", "seen", "words"),
    [
        (PermissionError(13, "Permission denied", "run"), PermissionError, "Permission denied"),
        (FileNotFoundError(2, "none"), DataError, "no .hydra/config.yaml. Give the output folder"),
        (IsADirectoryError(21, "is a folder"), DataError, "config.yaml cannot be read"),
    ],
)
def test_settings_that_cannot_be_read_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, seen: type[Exception], words: str
) -> None:
    def fail(path: Path) -> None:
        raise error

    monkeypatch.setattr("omegaconf.OmegaConf.load", fail)
    with pytest.raises(seen, match=words):
        Subject(tmp_path)
