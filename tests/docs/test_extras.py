"""The README's list of extras, and the command that error messages give to install one."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from fedcross.core.extras import install
from fedcross.core.paths import ROOMS

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = {*PROJECT["optional-dependencies"]}
SECTION = (ROOT / "README.md").read_text().split("\n### Extras\n")[1].split("\n## ")[0]


def test_the_readme_names_each_extra_and_which_ones_make_leaves_out():
    assert {*re.findall(r"`(\w+)`", SECTION.split("fedcross is on no")[0])} == EXTRAS
    (dev,) = (re.findall(r"\[(.+)\]", line)[0] for line in PROJECT["optional-dependencies"]["dev"] if "[" in line)
    assert EXTRAS - {*dev.split(",")} - {"dev"} == {"wandb", "mlflow"}
    assert "with all [extras](#extras) but `wandb` and `mlflow`" in (ROOT / "README.md").read_text()
    assert f"fedcross-{PROJECT['version']}-py3-none-any.whl[data]" in SECTION


def test_no_message_and_no_page_installs_from_an_index_where_fedcross_is_not():
    files = [
        *(path for room in ROOMS for end in ("py", "yaml") for path in (ROOT / room).rglob(f"*.{end}")),
        *(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md",
    ]  # fmt: skip
    texts = {path: path.read_text() for path in files}
    assert len(texts) > 100
    assert [path.name for path, text in texts.items() if re.search(r"fedcross\[[a-z]+\]", text)] == []
    asked = re.findall(r"(?:install\(['\"]|'\.\[)(\w+)['\"\]]", "".join(texts.values()))
    assert {"onnx", "page", "privacy", "transformers", "analysis"} <= {*asked} <= EXTRAS
    assert install("data").endswith("pip install -e '.[data]'")
    assert "pip install -e '.[data]'" in SECTION
