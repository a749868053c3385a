"""The program for the first minutes on a GPU works, tried on a CPU; its times are not judged here."""

import contextlib
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch

from benchmarks.gpu import accuracy, graphs, items, place, processes, rare, report, rounds, steps, trainers
from benchmarks.gpu.expected import MOVED, faults
from benchmarks.gpu.items import ITEMS, run_all
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import BROKEN, Lines
from fedcross.client import workshop
from fedcross.client.captured import Captured
from fedcross.core.settings import Settings
from fedcross.strategies.parts.objective import Objective
from tests.support.emulated_gpu import emulated_gpu

ROOT = Path(__file__).parents[2]
CPU = Place(torch.device("cpu"), tiny=True)


@pytest.mark.slow
@pytest.mark.usefixtures("warm_start")
def test_every_item_finds_something_on_a_cpu(tmp_path):
    """Two items as a user runs them, the others here; a bare machine has no scikit-learn for the digits.

    The four processes are forked (tests.support.warm); test_gpu_faults starts new ones.
    """
    (tmp_path / "sklearn.py").write_text("raise ModuleNotFoundError('there is none')")
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--only", "smoke", "--only"]
    file = tmp_path / "new" / "gpu.json"
    ended = subprocess.run(
        [*command, "processes", "--output", str(file)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for name in ITEMS:
        if name not in {"smoke", "processes"}:
            importlib.import_module(f"benchmarks.gpu.{name}").measure(CPU, Lines(file, name))
    found = json.loads(file.read_text())
    assert set(found["items"]) == set(ITEMS)
    assert all(item["found"] for item in found["items"].values())
    assert faults(found, list(ITEMS)) == []
    assert (found["device"], found["machine"], found["torch"]) == ("cpu", "CPU", torch.__version__)


#: A process that writes one line, ends as its argument says at the second, and writes a third one.
DYING = """
import os, signal, sys
from pathlib import Path
from benchmarks.gpu.report import Lines
line = Lines(Path(sys.argv[1]), sys.argv[2])

def broken():
    if sys.argv[3] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")

line("first", lambda: os.getpid())
line("second", broken)
line("third", lambda: os.getpid())
"""


@pytest.mark.usefixtures("warm_start")
@pytest.mark.parametrize("how", ["kill", pytest.param("raise", marks=pytest.mark.slow)])
def test_a_fault_costs_one_line_and_a_new_process_goes_on(tmp_path, how):
    file = tmp_path / "gpu.json"

    def command(name):
        return [sys.executable, "-c", DYING, str(file), name, how]

    found = run_all(["smoke"], file, command, tiny=True)
    assert found == json.loads(file.read_text())
    killed, raised = "the process ended here (exit code -9)", "RuntimeError: CUDA error: an illegal memory access was"
    error = killed if how == "kill" else raised
    item = found["items"]["smoke"]
    lines = item["found"]
    assert list(lines) == ["first", "second", "third"]
    assert lines["second"]["error"].startswith(error)
    assert lines["first"] != lines["third"]
    assert "ended" not in item
    assert f"smoke: second: {lines['second']['error']}" in faults(found)
    assert ("in broken" in lines["second"].get("traceback", "")) == (how == "raise")
    assert ("in broken" in file.with_suffix(".log").read_text()) == (how == "raise")


def test_an_item_that_never_begins_or_never_ends_is_left(tmp_path, monkeypatch):
    file, commands = tmp_path / "gpu.json", {"smoke": "raise SystemExit(7)", "trace": "import time; time.sleep(600)"}
    monkeypatch.setitem(items.ITEMS, "trace", 1)
    monkeypatch.setattr(items, "START", 1)
    found = run_all(list(commands), file, lambda name: [sys.executable, "-c", commands[name]], tiny=False)
    assert found["items"]["smoke"]["ended"] == {"error": "the last process ended with code 7"}
    assert found["items"]["trace"]["ended"] == {"error": "stopped after 1 seconds; the log says where"}


def test_a_line_is_written_before_the_next_one_and_an_error_is_a_line(tmp_path):
    file = tmp_path / "gpu.json"
    line = Lines(file, "smoke")
    line("one", lambda: 1)
    line("two", lambda: report.read(file)["items"]["smoke"]["found"]["one"] + 1)
    line("three", lambda: {}["missing"])
    line("one", lambda: 9)
    assert report.read(file)["items"]["smoke"]["found"] == {
        "one": 1,
        "two": 2,
        "three": {"error": "KeyError: 'missing'", "traceback": ANY},
    }
    with pytest.raises(SystemExit) as ended:
        line("four", lambda: torch.zeros(1) + raised(torch.AcceleratorError("device-side assert triggered")))
    assert ended.value.code == BROKEN


def raised(error):
    raise error


def reading(self, net, params, buffers, batch, prepared):
    """Read a number of the GPU in every step."""
    loss = Objective.loss(self, net, params, buffers, batch, prepared)
    return loss * (2 if loss.item() > 1 else 1)


@pytest.mark.slow
def test_two_rounds_of_a_buffering_method_train_its_model():
    """Ten updates, which FedBuff waits for by default, are more than these rounds have."""
    assert rounds.ran("fedbuff", rounds.LOCAL, "cpu")[2] > MOVED


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "batched"])
def test_smoke_tells_recorded_methods_from_others(monkeypatch, engine):
    """On the emulated GPU; without recorded steps on this site, and with a visit that fails."""
    gpu = Place(torch.device("cuda:0"), tiny=True)
    chosen = [f"engine={engine}", *(["engine.workers=1"] if engine == "local" else [])]
    with emulated_gpu(monkeypatch):
        found = rounds.two_rounds(gpu, "fedsam", chosen)
        assert found["ran"] == "recorded"
        assert found["replays"] > 10
        monkeypatch.setattr("fedcross.strategies.fedsam.Sharpness.loss", reading)
        if engine == "local":
            found = rounds.two_rounds(gpu, "fedsam", chosen)
            assert (found["ran"], found["replays"]) == ("not recorded", 0)
            assert "a step cannot be recorded (" in found["reasons"][0]
        else:  # vmap refuses what reads a number
            with pytest.raises(RuntimeError, match="A round of 3 clients is trained one client after another"):
                rounds.two_rounds(gpu, "fedsam", chosen)
        workshop._open.clear()  # tensors of the emulated GPU do not outlive it


def test_what_is_replayed_stays_alive(monkeypatch):
    """A graph holds addresses; the tensors belong to the recorded call."""
    alive = []

    def record(call):
        inside = dict(zip(call.__code__.co_freevars, call.__closure__, strict=True))
        alive.extend(weakref.ref(inside[name].cell_contents) for name in ("momentum", "rows", "y", "net"))
        return lambda: None

    monkeypatch.setattr(steps, "record_cuda", record)
    replay = steps.streams([place.stepper(CPU, "lenet5") for _ in range(2)])
    gc.collect()
    assert all(one() is not None for one in alive)
    del replay
    gc.collect()
    assert [one() for one in alive] == [None] * 8


@pytest.mark.parametrize("last", [True, False])
def test_a_row_measures_the_layout_that_it_names(tmp_path, monkeypatch, last):
    """All ways of a row: eager, and on streams."""
    made = []
    monkeypatch.setattr(steps, "stepper", lambda *_, last: made.append(last) or (lambda: None))
    monkeypatch.setattr(steps, "record_cuda", lambda call: call)
    monkeypatch.setattr(steps, "_batched", lambda *_, **__: 0.0)
    monkeypatch.setattr(steps, "_captured", lambda place, made, count: made() and None)
    monkeypatch.setattr(Place, "ms", lambda self, call, repeats=20: 0.0)
    monkeypatch.setattr(steps, "MODELS", ("lenet5",))
    line, name = Lines(tmp_path / "gpu.json", "steps"), "NHWC" if last else "NCHW"
    steps.measure(Place(torch.device("cuda:0"), tiny=False), lambda text, call: name in text and line(text, call))
    assert made == [last] * (9 if last else 3)  # three ways in each precision; the other layout for float32 alone
    inputs = place.inputs_of(place.network(CPU, "lenet5"), "lenet5", 4, last=last)
    assert inputs.held.is_contiguous(memory_format=torch.channels_last) == last


#: Says how many others were ready when it was told to go on.
WAITING = """
import sys, uuid
from pathlib import Path
Path(sys.argv[1], uuid.uuid4().hex).touch()
print("ready", flush=True)
sys.stdin.readline()
print(len(list(Path(sys.argv[1]).iterdir())))
"""


def test_processes_begin_together(tmp_path):
    command = [sys.executable, "-c", WAITING, str(tmp_path)]
    assert processes.at_once([command] * 3) == [["3"]] * 3
    with pytest.raises(RuntimeError, match="ended with code 4 before it was ready"):
        processes.at_once([[sys.executable, "-c", "raise SystemExit(4)"]])


def test_a_step_that_is_called_in_place_of_a_recorded_one_does_not_count():
    net = place.network(CPU, "lenet5")
    captured = Captured(net, Objective(Settings()), record=lambda call: call)
    for _ in range(2):
        captured.train(place.visit(net, 0, 100), {}, place.settings(batch=10))
    assert captured.replays > 0
    assert trainers.replayed([captured], CPU) == {"ran": "not recorded", "replays": 0, "reasons": ["there is no GPU"]}


@pytest.mark.slow
def test_accuracy_compares_with_the_cpu(tmp_path):
    file = tmp_path / "gpu.json"
    accuracy.measure(CPU, Lines(file, "accuracy"))
    found = report.read(file)["items"]["accuracy"]["found"]
    assert found["bytes prepared as on the CPU"] is True
    assert found["lenet5 float32"] == {"from CPU": 0.0, "same twice": True}
    assert found["lenet5 bfloat16"]["from CPU"] > 0


def recorded_with(counted):
    """Return what takes the place of recording: a graph has a stream."""

    def record(call):
        replay = functools.partial(counted.recorder(call))
        replay.stream = None
        return replay

    return record


@pytest.fixture
def gpu(monkeypatch):
    """An emulated GPU with a second one beside it, and the functions of ``torch.cuda`` that only measuring asks."""
    asked = {
        "synchronize": lambda device=None: None,
        "Stream": lambda device=None: None,
        "stream": lambda _: contextlib.nullcontext(),
        "reset_peak_memory_stats": lambda device=None: None,
        "max_memory_reserved": lambda device=None: 2**30,
        "max_memory_allocated": lambda device=None: 2**29,
        "set_per_process_memory_fraction": lambda *_: None,
    }
    with emulated_gpu(monkeypatch, gpus=2) as counted:
        for name, value in asked.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for module in (graphs, steps):
            monkeypatch.setattr(module, "record_cuda", recorded_with(counted))
        monkeypatch.setattr(place, "arithmetic", lambda *_, **__: None)
        yield Place(torch.device("cuda:0"), tiny=True)
        workshop._open.clear()  # tensors of the emulated GPU do not outlive it


@pytest.mark.slow
def test_what_only_a_gpu_does_runs_on_an_emulated_one(tmp_path, monkeypatch, gpu):
    """All of ``graphs``; in ``steps`` the recorded ways of a batched round and of streams; both trainers of an LSTM."""
    file = tmp_path / "gpu.json"
    monkeypatch.setitem(SHAPES, "lstm", (4,))  # 80 characters take a minute
    graphs.measure(gpu, Lines(file, "graphs"))
    steps.measure(gpu, Lines(file, "steps"))
    smoke_line = Lines(file, "smoke")
    smoke_line("lstm", lambda: trainers.both_trainers(gpu, "lstm"))
    smoke_line("own", lambda: trainers.both_trainers(gpu, "own"))
    smoke_line("second GPU", lambda: rare.second_gpu(gpu))
    assert torch.cuda.current_device() == 0
    smoke_line("deterministic, asked for late", lambda: rare.deterministic_late(gpu))
    found = report.read(file) | {"device": "cuda:0"}
    items = {name: item["found"] for name, item in found["items"].items()}
    # Nothing counts time or memory here.
    assert [fault for fault in faults(found) if "not above zero" not in fault] == []
    assert set(items["graphs"]) == {"lenet5, seconds a recording", "lenet5, 20 rounds"}
    assert len(items["graphs"]["lenet5, 20 rounds"]["used of the card, MB"]) == 20
    assert {"lenet5 float32 NHWC, captured, 4 streams", "lenet5 batched, vmap + graph"} < set(items["steps"])
    for line in ("lstm", "own", "second GPU"):
        assert items["smoke"][line]["from CPU"]["batched, captured"] < 1e-6
        assert items["smoke"][line]["captured"]["replays"] > 4
