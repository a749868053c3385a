from __future__ import annotations

from pathlib import Path

import pytest

from fedcross.core.paths import import_root
from fedcross.deploy import requirements, sbom

ROOT = import_root()
LOCK = """\
flwr==1.41.0 \\
    --hash=sha256:aa
    # via fedcross (pyproject.toml)
Ray_x==2.0 \\
    --hash=sha256:bb
    # via flwr
msgpack==1.0 \\
    --hash=sha256:cc
    # via ray-x
click==8.0 \\
    --hash=sha256:dd \\
    --hash=sha256:ee
    # via
    #   flwr
    #   ray-x
pytest==9.0 \\
    --hash=sha256:ff
    # via fedcross (pyproject.toml)
"""
PROJECT = """\
[project]
name = "p"
dependencies = ["flwr[simulation]==1.41.0"]
[project.optional-dependencies]
dev = ["pytest>=9"]
"""


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "lock").write_text(LOCK)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    return [str(tmp_path / "lock"), str(tmp_path / "pyproject.toml")]


def names(text: str) -> list[str]:
    return [line.split("==")[0] for line in text.splitlines() if "==" in line]


def test_only_what_the_project_needs_with_all_hashes(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert requirements.main(files) == 0
    text = capsys.readouterr().out
    assert names(text) == ["click", "flwr", "msgpack", "Ray_x"]
    assert "click==8.0 \\\n    --hash=sha256:dd \\\n    --hash=sha256:ee\n" in text
    assert "#" not in text


def test_what_is_left_out_takes_along_what_only_it_needs(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    requirements.main([*files, "--without", "ray-x"])
    assert names(capsys.readouterr().out) == ["click", "flwr"]


def test_extras_and_single_packages(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    requirements.main([*files, "--extra", "dev", "--without", "flwr"])
    assert names(capsys.readouterr().out) == ["pytest"]
    requirements.main([*files, "--only", "ray.x"])
    assert names(capsys.readouterr().out) == ["click", "msgpack", "Ray_x"]


def test_a_package_that_is_not_locked_is_named(files: list[str]) -> None:
    with pytest.raises(SystemExit, match="no none-such in it"):
        requirements.main([*files, "--only", "none-such"])


def test_the_projects_own_lock_has_what_the_image_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    own = [str(ROOT / "requirements.lock"), str(ROOT / "pyproject.toml")]
    extras = [word for extra in sbom.IMAGE_EXTRAS for word in ("--extra", extra)]
    requirements.main([*own, *extras, "--without", *sbom.NOT_IN_IMAGE])
    found = names(capsys.readouterr().out)
    wanted = {"flwr", "torch", "torchvision", "hydra-core", "opacus", "tensorboard", "safetensors", "pyarrow"}
    assert wanted <= set(found)
    assert not {"ray", "msgpack", "matplotlib", "uv", "pytest", "ruff", "mypy", "plotly", "datasets"} & set(found)


def test_what_only_a_gpu_needs_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    lock, project = str(ROOT / "requirements.lock"), str(ROOT / "pyproject.toml")
    requirements.main([lock, project])
    whole = {*names(capsys.readouterr().out)}
    requirements.main([lock, project, "--without-gpu-except", "cuda-toolkit", "nvidia-cuda-runtime"])
    left = {*names(capsys.readouterr().out)}
    assert {"torch", "cuda-toolkit", "nvidia-cuda-runtime"} <= left
    gone = whole - left
    assert {"triton", "nvidia-cublas", "nvidia-cudnn-cu13"} <= gone
    assert all(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in gone)
