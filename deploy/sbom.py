"""Writes the bill of materials of ``requirements.lock`` (CycloneDX, JSON) and the notice of third-party licences.

::

    python -m fedcross.deploy.sbom requirements.lock pyproject.toml sbom.cdx.json THIRD_PARTY.md

The lock says which packages and versions, the installed packages' metadata say under which licences. The same lock and
the same installation give the same bytes. Needs the development extras (``make sbom``).
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tomllib
import uuid
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from fedcross.deploy.requirements import Pin, read_lock, roots, select

#: Extras and packages of the container image (Dockerfile); the others are for other uses and for development.
IMAGE_EXTRAS, NOT_IN_IMAGE = ("privacy", "page", "data"), ("ray", "matplotlib", "uv", "flwr-datasets")
UNKNOWN = "not stated"
_HEAD = """\
# Third-party software

What fedcross is used and developed with: the packages of `requirements.lock`, with the licence that each one's metadata
states. `make sbom` writes this page and `sbom.cdx.json`. The container image holds those marked with a star, each with
its licence's text in its `.dist-info` folder below `/opt/fedcross/lib`; of NVIDIA's it holds the CUDA runtime only,
unless it was built for a GPU. The images' Debian packages state their licences in `/usr/share/doc`.

| package | version | image | licence |
|---|---|---|---|
"""


def licence(name: str) -> str:
    """Return the licence that the installed package states: an SPDX expression, or what its classifiers say."""
    try:
        facts = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return UNKNOWN
    if expression := facts.get_all("License-Expression"):
        return str(expression[0])
    classified = [
        line.rsplit(" :: ", 1)[1] for line in facts.get_all("Classifier") or () if line.startswith("License ::")
    ]
    stated = str((facts.get_all("License") or [""])[0]).strip().splitlines()
    short = stated[0] if stated and len(stated[0]) <= 60 else ""
    return ", ".join(one for one in classified if one != "OSI Approved") or short or UNKNOWN


def version(pin: Pin) -> str:
    """Return the version of a pin."""
    return pin.text.splitlines()[0].split("==")[1].split(" ")[0].split(";")[0].strip(" \\")


def bill(pins: Mapping[str, Pin], release: str, licences: Mapping[str, str]) -> str:
    """Return the bill of materials of this release as CycloneDX 1.6 JSON."""
    from cyclonedx.contrib.license.factories import LicenseFactory
    from cyclonedx.model.bom import Bom, BomMetaData
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output import make_outputter
    from cyclonedx.schema import OutputFormat, SchemaVersion
    from packageurl import PackageURL

    make = LicenseFactory().make_from_string
    own = Component(name="fedcross", version=release, type=ComponentType.APPLICATION, bom_ref="fedcross")
    parts = {
        name: Component(
            name=name,
            version=version(pin),
            type=ComponentType.LIBRARY,
            bom_ref=f"{name}=={version(pin)}",
            purl=PackageURL("pypi", None, name, version(pin)),
            licenses=[] if licences[name] == UNKNOWN else [make(licences[name])],
        )
        for name, pin in pins.items()
    }
    number = uuid.UUID(hashlib.sha256("".join(pin.text for pin in pins.values()).encode()).hexdigest()[:32])
    bom = Bom(components=parts.values(), metadata=BomMetaData(component=own), serial_number=number)
    for name, pin in pins.items():
        for parent in pin.needed_by & pins.keys():
            bom.register_dependency(parts[parent], [parts[name]])
    bom.register_dependency(own, [part for name, part in parts.items() if _direct(pins, name)])
    # The time of writing is no property of the lock.
    bom.metadata.timestamp = None  # type: ignore[assignment]
    return make_outputter(bom, OutputFormat.JSON, SchemaVersion.V1_6).output_as_string(indent=1) + "\n"


def _direct(pins: Mapping[str, Pin], name: str) -> bool:
    """Return whether fedcross itself needs the package."""
    return "fedcross" in pins[name].needed_by or not pins[name].needed_by & pins.keys()


def notice(pins: Mapping[str, Pin], image: set[str], licences: Mapping[str, str]) -> str:
    """Return the page of licences."""
    rows = [
        f"| {name} | {version(pins[name])} | {'*' if name in image else ''} | {licences[name]} |"
        for name in sorted(pins)
    ]
    return _HEAD + "\n".join(rows) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write the bill of materials and the notice of licences.")
    for name in ("lock", "project", "bill", "notice"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args(argv)
    pins = read_lock(arguments.lock.read_text(encoding="utf-8"))
    project = tomllib.loads(arguments.project.read_text(encoding="utf-8"))
    licences = {name: licence(name) for name in pins}
    image = {*select(pins, roots(project, IMAGE_EXTRAS), NOT_IN_IMAGE)}
    arguments.bill.write_text(bill(pins, str(project["project"]["version"]), licences), encoding="utf-8")
    arguments.notice.write_text(notice(pins, image, licences), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
