from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from flwr.cli.build import build_fab_from_disk
from flwr.cli.config_utils import load_and_validate
from flwr.common.constant import FAB_MAX_SIZE

from fedcross.core.errors import StorageError
from fedcross.core.paths import import_root
from fedcross.deploy import hub

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


@pytest.mark.slow
def test_the_folder_may_be_published_and_gives_the_bundle_of_the_checkout(tmp_path: Path) -> None:
    """Format, licence, description, kinds, number and sizes of files: Flower's own checks before an upload."""
    publish = importlib.import_module("flwr.cli.app_cmd.publish")  # the package has a function of this name
    app = hub.make(tmp_path / "fedcross")
    config, _ = load_and_validate(app / "pyproject.toml", check_module=False)
    publish._validate_app_name(app.name, "Flower App directory name")
    publish._validate_description(config["project"]["description"])
    files = publish._collect_file_paths(app)
    assert app / "LICENSE" in files
    publish._validate_files(files)
    assert len(build_fab_from_disk(app)) < FAB_MAX_SIZE / 4
    with pytest.raises(StorageError, match="exists already"):
        hub.make(app)


def test_without_a_checkout_there_is_nothing_to_publish(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    with pytest.raises(StorageError, match=r"no checkout of fedcross, pyproject.toml is missing"):
        hub.make(tmp_path / "app", tmp_path / "site-packages")
    assert (import_root() / "pyproject.toml").is_file()
