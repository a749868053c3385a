"""Tests of what a record says about its machine."""

import os
import platform

from fedcross.core import machine


def test_a_processor_has_the_systems_name_else_the_architectures(tmp_path, monkeypatch):
    told = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "CPUINFO", told)
    monkeypatch.setattr(platform, "processor", lambda: "")
    assert machine.processor() == platform.machine()
    told.write_text("processor\t: 0\nmodel name\t: \n")
    assert machine.processor() == platform.machine()
    told.write_text("processor\t: 0\nmodel name\t: AMD EPYC: 7B13\nmodel name\t: another\n")
    assert machine.processor() == "AMD EPYC: 7B13"
    known = f"{platform.machine()} {platform.system()}, AMD EPYC: 7B13, {os.cpu_count()} cores"
    assert machine.described() == known
    assert machine.described("NVIDIA H100 80GB HBM3") == f"{known}, NVIDIA H100 80GB HBM3"
