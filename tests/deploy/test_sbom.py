from __future__ import annotations

import json
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

from fedcross.core.paths import import_root
from fedcross.deploy import sbom
from fedcross.deploy.requirements import read_lock, roots, select

ROOT = import_root()


def test_the_bill_and_the_notice_are_those_of_the_lock() -> None:
    """Run make sbom after make lock."""
    pins = read_lock((ROOT / "requirements.lock").read_text())
    bill = json.loads((ROOT / "sbom.cdx.json").read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert {part["name"]: part["version"] for part in bill["components"]} == {
        n: sbom.version(p) for n, p in pins.items()
    }
    assert all(part["purl"] == f"pkg:pypi/{part['name']}@{part['version']}" for part in bill["components"])
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert bill["metadata"]["component"]["version"] == project["version"]
    notice = (ROOT / "THIRD_PARTY.md").read_text()
    assert all(f"| {name} | {sbom.version(pin)} |" in notice for name, pin in pins.items())


def test_image_and_machines_without_containers_have_the_packages_that_the_notice_marks() -> None:
    lists = {
        name: re.findall(r"(--extra .+ --without .+?) (?:\$gpu )?> run\.txt", (ROOT / name).read_text())
        for name in ("Dockerfile", "deploy/templates/README.md", "docs/deploy-without-containers.md")
    }
    extras = " ".join(f"--extra {extra}" for extra in sbom.IMAGE_EXTRAS)
    wanted = f"{extras} --without {' '.join(sbom.NOT_IN_IMAGE)}"
    assert lists == {name: [wanted] for name in lists}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    pins = read_lock((ROOT / "requirements.lock").read_text())
    marked = re.findall(r"^\| (\S+) \| \S+ \| \* \|", (ROOT / "THIRD_PARTY.md").read_text(), re.MULTILINE)
    assert marked == select(pins, roots(project, sbom.IMAGE_EXTRAS), sbom.NOT_IN_IMAGE)
    # of the tasks that docs/deploy.md offers, table needs more than the required packages
    assert "pyarrow" in marked


@pytest.mark.slow
def test_the_same_lock_gives_the_same_bytes(tmp_path: Path) -> None:
    pins = ("click==8.0 \\\n    --hash=sha256:dd\n    # via typer", "typer==1.0 \\\n    --hash=sha256:aa")
    (tmp_path / "lock").write_text("\n".join(pins) + "\n")
    table = '[project]\nname = "p"\nversion = "1.0"\ndependencies = []\n'
    table += "".join(f"optional-dependencies.{extra} = []\n" for extra in sbom.IMAGE_EXTRAS)
    (tmp_path / "project").write_text(table)
    outputs = []
    for name in ("a", "b"):
        sbom.main([str(tmp_path / one) for one in ("lock", "project", name, f"{name}.md")])
        outputs.append((tmp_path / name).read_text())
    assert outputs[0] == outputs[1]
    needs = {one["ref"]: one.get("dependsOn", []) for one in json.loads(outputs[0])["dependencies"]}
    assert needs["fedcross"] == ["typer==1.0"]
    assert needs["typer==1.0"] == ["click==8.0"]


@pytest.mark.parametrize(
    ("printed", "code", "said"),
    [
        ("Found 2 known vulnerabilities in 1 package\nclick 8.0 PYSEC-1", 1, "KNOWN VULNERABILITIES"),
        ("No known vulnerabilities found", 0, "no known vulnerability in"),
        ("ConnectionError: no route to host", 1, "LEFT OUT: pip-audit could look nothing up (exit code 1)"),
        ("torch could not be audited\n" * 1000, 0, "LEFT OUT: pip-audit could look nothing up (exit code 0)"),
    ],
)
def test_the_audit_says_what_it_found_and_also_that_it_could_look_nothing_up(
    tmp_path: Path, printed: str, code: int, said: str
) -> None:
    program = tmp_path / "pip-audit"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{printed}\nEND\nexit {code}\n")
    program.chmod(0o755)
    command = ["make", "--silent", "--old-file", ".venv/.ready", "audit", f"BIN={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert "step make audit" in (ROOT / ".ci" / "run").read_text().splitlines()
