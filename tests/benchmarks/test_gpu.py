"""The program for the first minutes on a GPU works, tried on a CPU; its times are not judged here."""

import json
import sys

import pytest

from benchmarks import gpu


def faults(found):
    if isinstance(found, dict):
        return [found["error"]] if "error" in found else [fault for part in found.values() for fault in faults(part)]
    return []


@pytest.mark.slow
def test_every_item_finds_something_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)  # a bare machine has none, and the digits come with it
    found = gpu.main(["--device", "cpu", "--tiny", "--output", str(tmp_path / "gpu.json")])
    assert json.loads((tmp_path / "gpu.json").read_text()) == json.loads(json.dumps(found))
    assert list(found["items"]) == list(gpu.ITEMS)
    assert faults(found) == []
    assert found["items"]["accuracy"]["found"]["bytes prepared as on the CPU"]
    assert found["items"]["accuracy"]["found"]["lenet5 float32"] == {"from CPU": 0.0, "same twice": True}


def test_an_item_that_fails_leaves_its_error_and_the_next_one_starts(tmp_path, monkeypatch):
    def broken(place):
        raise RuntimeError("CUDA error: no kernel image is available\nmore")

    monkeypatch.setitem(gpu.ITEMS, "smoke", broken)
    file = tmp_path / "new" / "gpu.json"
    gpu.main(["--device", "cpu", "--tiny", "--only", "smoke", "--only", "convolutions", "--output", str(file)])
    items = json.loads(file.read_text())["items"]
    assert items["smoke"]["found"] == {"error": "RuntimeError: CUDA error: no kernel image is available"}
    assert len(items["convolutions"]["found"]) == 4
