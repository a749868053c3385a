"""What the program for the first minutes on a GPU calls a fault, on reports that are made up, and how it ends."""

import copy
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import accuracy, convolutions, items, machine, methods, rare, rounds, smoke, steps, trainers
from benchmarks.gpu import place as place_module
from benchmarks.gpu.expected import DEEP, LACKS, NORMED, faults, notes, recorded
from benchmarks.gpu.items import begin, run_all
from benchmarks.gpu.models import SHAPES, build
from benchmarks.gpu.place import Place
from benchmarks.gpu.report import lines, read, write
from fedcross.conf.compose import CONF
from fedcross.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
ENGINES = ("engine=local", "engine=batched")
GOOD = {"ran": "recorded", "replays": 9}
#: A method's line.
METHOD = GOOD | {"from CPU": 1e-7, "moved on CPU": 0.03}
BAD = {"ran": "not recorded", "replays": 0, "reasons": ["a step cannot be recorded (x)"]}
FLAT = {"reserved, MB": [1.0, 50.0, *[90.0] * 18], "kept by graphs, MB": [4.0] * 20, "captured": GOOD, "batched": GOOD}
FLAT["used of the card, MB"] = [900.0] * 20
SHORT = {"apart": {"captured": 1e-7}, "captured": BAD, "batched, captured": GOOD, "at once": 1}
#: A report without a fault.
REPORT = {
    "device": "cuda:0",
    "items": {
        "smoke": {
            "found": {
                "fedavg engine=local": METHOD,
                "solo engine=local": METHOD | {"moved on CPU": 0.0},
                "lenet5": {"apart": {"batched": 1e-7}, "captured": GOOD, "batched, captured": GOOD},
                "little memory": SHORT,
                "deterministic, asked for late": {"lenet5": True},
                "second GPU": "one GPU only",
                "a worker on each GPU": {"from CPU": 1e-7},
                "recurrent layers": {"float32": "float32", "bfloat16": "bfloat16"},
                "augmentation": [8, 3, 32, 32],
            }
        },
        "accuracy": {
            "found": {
                "bytes prepared as on the CPU": True,
                "lenet5 tf32": {"from CPU": 1e-4, "same twice": False},
                "resnet20 float32": {"from CPU": 1e-3, "same twice": False},
                "lenet5 float32, deterministic": {"from CPU": 1e-7, "same twice": True},
            }
        },
        "graphs": {"found": {"lenet5, seconds a recording": 0.2, "lenet5, 20 rounds": FLAT}},
        "steps": {"found": {"lenet5 float32 NHWC, eager": 0.5}},
        "trace": {"found": {"resnet20": {"calls a step": 3.0, "dearest, us": [["conv", 3, 9.5]]}}},
    },
}
#: Item, line, what it says in place of the above, and what is said of that.
WRONG = [
    ("smoke", "fedavg engine=local", METHOD | BAD, "not recorded: a step cannot be recorded (x)"),
    ("smoke", "fedavg engine=local", METHOD | {"replays": 0}, "not recorded: no step was replayed"),
    ("smoke", "fedavg engine=local", METHOD | {"from CPU": 0.2}, "0.2 from the CPU, more than 0.001"),
    ("smoke", "fedavg engine=local", GOOD, "not compared with the CPU"),
    (
        "smoke",
        "fedavg engine=local",
        METHOD | {"moved on CPU": 0.0},
        "the method changes a weight by 0.0 only, so this says nothing",
    ),
    ("smoke", "recurrent layers", {"float32": "float32"}, "not measured: bfloat16"),
    ("smoke", "deterministic, asked for late", {}, "not measured: lenet5"),
    (
        "accuracy",
        "lenet5 tf32",
        {"from CPU": 0.0, "same twice": True},
        "0.0 from the CPU's float32: this was not computed in tf32",
    ),
    ("trace", "resnet20", {"calls a step": 3.0, "dearest, us": []}, "no operation was seen"),
    ("smoke", "lenet5", {"apart": {"batched": 3.7}, "captured": GOOD}, "batched: 3.7 apart, more than 0.0001"),
    ("smoke", "lenet5", {"apart": {"batched": math.nan}, "captured": GOOD}, "not finite: batched"),
    ("smoke", "lenet5", {"apart": {}, "captured": BAD}, "not recorded (captured): a step cannot be recorded (x)"),
    ("smoke", "lenet5", {"error": "no"}, "no"),
    (
        "smoke",
        "lenet5",
        {"apart": {}, "share of CPU's change": {"plain": 0.02}, "captured": GOOD},
        "plain: 0.02 of the CPU's change, more than 0.01",
    ),
    ("smoke", "vgg16_bn", {"apart": {"batched": 0.02}, "captured": GOOD}, "batched: 0.02 apart, more than 0.01"),
    ("smoke", "fedfusion_multi engine=local", METHOD | {"from CPU": 0.2}, "0.2 from the CPU, more than 0.01"),
    ("smoke", "little memory", SHORT | {"apart": {"captured": 0.1}}, "captured: 0.1 apart, more than 0.003"),
    ("smoke", "deterministic, asked for late", {"lenet5": False}, "lenet5: another result the second time"),
    ("smoke", "a worker on each GPU", {"from CPU": 0.1}, "0.1 from the CPU, more than 0.001"),
    (
        "accuracy",
        "fedgen float32, deterministic",
        {"from CPU": 0.1, "same twice": True},
        "0.1 from the CPU, more than 0.001",
    ),
    ("smoke", "lenet5", None, "does not say whether steps were recorded: None"),
    (
        "smoke",
        "recurrent layers",
        {"float32": "float32", "bfloat16": "float16"},
        "computed in another type: {'bfloat16': 'float16'}",
    ),
    ("smoke", "augmentation", [8, 3], "shape [8, 3], not [8, 3, 32, 32]"),
    ("accuracy", "bytes prepared as on the CPU", False, "they are not"),
    (
        "accuracy",
        "arithmetic float32",
        {"convolution": 3e-4, "product": 2e-7},
        "convolution: 0.0003 from float64, not 0.0 to 3e-05 as in float32",
    ),
    (
        "accuracy",
        "arithmetic tf32",
        {"convolution": 3e-4, "product": 2e-7},
        "product: 2e-07 from float64, not 3e-05 to 0.0007 as in tf32",
    ),
    ("accuracy", "arithmetic bfloat16", {"product": 2e-3}, "not measured: convolution"),
    ("accuracy", "lstm bfloat16", "not on this CPU", "not measured: not on this CPU"),
    ("accuracy", "resnet20 tf32", {"from CPU": 4e-3, "same twice": True}, "0.004 from the CPU, more than 0.003"),
    ("accuracy", "lenet5 bfloat16", {"from CPU": 6e-4, "same twice": True}, "0.0006 from the CPU, more than 0.0005"),
    ("smoke", "fedcross own engine=batched", METHOD | {"from CPU": 0.02}, "0.02 from the CPU, more than 0.001"),
    ("smoke", "fedcross lstm engine=batched", METHOD | {"from CPU": 0.002}, "0.002 from the CPU, more than 0.001"),
    ("accuracy", "lenet5 tf32", {"from CPU": 0.1, "same twice": True}, "0.1 from the CPU, more than 0.0003"),
    ("accuracy", "lenet5 tf32", {"from CPU": math.inf, "same twice": True}, "not finite: from CPU"),
    (
        "accuracy",
        "lenet5 float32, deterministic",
        {"from CPU": 0.0, "same twice": False},
        "another result the second time",
    ),
    ("graphs", "lenet5, seconds a recording", 0.0, "not above zero: value"),
    (
        "graphs",
        "lenet5, 20 rounds",
        FLAT | {"reserved, MB": [90.0 + 2 * i for i in range(20)]},
        "reserved, MB: from 110.0 to 128.0 in the last ten rounds",
    ),
    ("graphs", "lenet5, 20 rounds", FLAT | {"batched": BAD}, "not recorded (batched): a step cannot be recorded (x)"),
    ("steps", "lenet5 float32 NHWC, eager", math.nan, "not finite: value"),
    ("trace", "resnet20", {}, "no number: {}"),
]


def test_a_report_as_it_should_be_has_no_fault():
    assert faults(REPORT) == []
    assert recorded(REPORT)[0].startswith("7 recorded: smoke fedavg engine=local, smoke solo engine=local, ")
    on_cpu = copy.deepcopy(REPORT) | {"device": "cpu"}
    on_cpu["items"]["smoke"]["found"]["fedavg engine=local"] = METHOD | BAD
    assert faults(on_cpu, ["smoke"]) == []


@pytest.mark.parametrize(("item", "line", "value", "fault"), WRONG)
def test_what_is_not_as_expected_is_a_fault(item, line, value, fault):
    report = copy.deepcopy(REPORT)
    report["items"][item]["found"][line] = value
    assert faults(report) == [f"{item}: {line}: {fault}"]


def test_nan_in_any_client_or_tensor_is_seen():
    """Python's max(0.0, nan) is 0.0."""
    good, bad = (SimpleNamespace(flat=torch.full((3,), value)) for value in (1.0, math.nan))
    assert math.isnan(trainers.apart([good, good], [good, bad]))
    model = {"first": np.ones(3), "second": np.ones(3)}
    assert math.isnan(rounds.farthest(model, model | {"second": np.full(3, math.nan)}))
    assert rounds.farthest(model, model) == 0.0


def test_a_cpu_without_bfloat16_in_recurrent_layers_is_no_fault(monkeypatch):
    """As this machine's CPU may be one."""
    place = Place(torch.device("cpu"), tiny=True)
    monkeypatch.setattr(accuracy, "has_bfloat16", lambda: False)
    found = smoke._recurrent(place)
    assert found == {"float32": "float32", "bfloat16": LACKS}
    assert accuracy._compared(place, "lstm", "bfloat16") == LACKS
    report = {"device": "cpu", "items": {"smoke": {"found": {"recurrent layers": found}}}}
    report["items"]["accuracy"] = {"found": {"lstm bfloat16": LACKS}}
    assert faults(report) == []
    assert len(faults(report | {"device": "cuda:0"})) == 2


def test_the_precision_is_set_and_verified_before_convolutions_are_measured(monkeypatch):
    asked = []
    monkeypatch.setattr(convolutions, "arithmetic", lambda _, precision: asked.append(precision))
    convolutions.measure(Place(torch.device("cpu"), tiny=True), lambda name, call: asked.append(name) or call())
    assert len(asked) == 16
    assert all(name.startswith(f"{precision}, ") for name, precision in zip(asked[::2], asked[1::2], strict=True))
    monkeypatch.setattr(place_module, "set_arithmetic", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    with pytest.raises(RuntimeError, match="float32 was asked for, but TF32 is allowed"):
        place_module.arithmetic(Place(torch.device("cuda:0"), tiny=True), "float32")


def test_arithmetic_is_told_apart_by_one_product():
    """float32 and bfloat16 on this CPU; TF32 as a CPU can do it: factors rounded to 10 bits."""
    place = Place(torch.device("cpu"), tiny=True)
    for precision in ("float32", "bfloat16"):
        value = accuracy.rounding(place, precision)
        for name in accuracy.PRECISIONS:
            wrong = faults({"device": "cuda:0", "items": {"accuracy": {"found": {f"arithmetic {name}": value}}}})
            assert bool(wrong) == (name != precision)


def test_what_was_not_measured_is_a_fault():
    assert faults(REPORT, ["steps", "processes"]) == ["processes: nothing was measured"]
    report = {"items": {"steps": {"found": {"a": 1.0}, "ended": {"error": "stopped"}}}}
    assert faults(report) == ["steps: stopped"]


def test_without_a_gpu_nothing_is_measured_unless_the_cpu_is_named(monkeypatch, tmp_path, capsys):
    """The variable of a site chooses nothing here: an image without GPUs sets it."""
    monkeypatch.setenv("FEDCROSS_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "init", no_driver)
    monkeypatch.setattr(program, "run_all", lambda *_, **__: pytest.fail("it measures"))
    for device in ("auto", "cuda"):
        monkeypatch.setattr(program.subprocess, "run", _inside)
        assert program.main(["--device", device, "--output", str(tmp_path / "gpu.json")]) == 2
        said = capsys.readouterr().err
        assert "Found no NVIDIA driver" in said
        assert f"torch {torch.__version__} (made for CUDA {torch.version.cuda}) cannot use a GPU here" in said
        assert "FEDCROSS_DEVICE" not in os.environ
    assert not (tmp_path / "gpu.json").exists()


def no_driver(*_, **__):
    raise RuntimeError("Found no NVIDIA driver on your system.")


def _inside(command, **_):
    """Look for a device in this process, which has loaded torch; say a commit."""
    if "--device" not in command:
        return subprocess.CompletedProcess(command, 0, "0" * 40, "")
    try:
        said = json.dumps(machine.about(command[command.index("--device") + 1]))
    except ConfigError as error:
        return subprocess.CompletedProcess(command, 2, "", str(error))
    return subprocess.CompletedProcess(command, 0, said, "")


def test_the_exit_code_says_whether_all_is_as_expected(tmp_path, monkeypatch):
    monkeypatch.setattr(program.subprocess, "run", _inside)
    arguments = ["--device", "cpu", "--only", "steps", "--output", str(tmp_path / "gpu.json")]
    for value, code in ((1.0, 0), (math.nan, 1), ({"error": "no"}, 1)):
        report = {"items": {"steps": {"found": {"a": value}}}}
        monkeypatch.setattr(program, "run_all", lambda *_, report=report, **__: report)
        assert program.main(arguments) == code
    arguments[arguments.index("cpu")] = "cuda:7"
    assert program.main(arguments) == 2


@pytest.mark.parametrize(
    ("device", "more", "seconds", "free"),
    [
        ("cpu", ["--tiny"], math.inf, True),
        ("cpu", ["--tiny", "--seconds", "700"], 700.0, True),
        ("cuda:0", ["--seconds", "0"], 0.0, False),
        ("cuda:0", ["--tiny"], program.TINY_SECONDS, False),
        ("cuda:0", ["--tiny", "--seconds", "7"], 7.0, False),
        ("cuda:0", [], program.SECONDS, False),
    ],
)
def test_only_a_trial_on_a_cpu_has_no_limit(tmp_path, monkeypatch, device, more, seconds, free):
    """What hangs on a GPU, where a minute is dear, is ended."""
    given = {}
    monkeypatch.setattr(program, "look", lambda *_: {"device": device})
    monkeypatch.setattr(program, "run_all", lambda *_, **limits: given.update(limits) or {"items": {}})
    program.main(["--only", "steps", "--output", str(tmp_path / "gpu.json"), *more])
    assert given == {"tiny": free, "seconds": pytest.approx(seconds, abs=5.0)}


def test_a_second_call_keeps_what_is_as_expected(tmp_path):
    file = tmp_path / "gpu.json"
    write(file, REPORT)
    found = read(file)
    lines(found, "smoke")["fedavg engine=local"] = METHOD | BAD
    write(file, found)
    begin(["smoke", "trace"], file, {"device": "cuda:0"}, anew=False)
    kept = read(file)["items"]
    assert "fedavg engine=local" not in kept["smoke"]["found"]
    assert "lenet5" in kept["smoke"]["found"]
    assert kept["accuracy"] == REPORT["items"]["accuracy"]
    begin(["smoke"], file, {"device": "cuda:0"}, anew=True)
    kept = read(file)["items"]
    assert (kept["smoke"]["found"], kept["trace"]["found"]) == ({}, REPORT["items"]["trace"]["found"])
    with pytest.raises(ValueError, match="give another --output"):
        begin(["smoke"], file, {"device": "cuda:1"}, anew=False)


def test_the_look_at_the_device_counts(tmp_path, monkeypatch):
    """It loads torch and starts CUDA: a minute on a cold machine."""
    given, clock = {}, iter([100.0, 140.0])
    monkeypatch.setattr(program.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(program, "look", lambda *_: {"device": "cuda:0"})
    monkeypatch.setattr(program, "run_all", lambda *_, **limits: given.update(limits) or {"items": {}})
    program.main(["--only", "steps", "--seconds", "100", "--output", str(tmp_path / "gpu.json")])
    assert given["seconds"] == 60.0

    def late(_command, timeout, **_):
        raise subprocess.TimeoutExpired([], timeout)

    monkeypatch.undo()
    monkeypatch.setattr(program.subprocess, "run", late)
    with pytest.raises(ValueError, match="within 7 seconds"):
        program.look("cuda", 7.0)


NOW = {"device": "cuda:0", "commit": "a", "sources": "b", "environment": {"driver": "580", "CUDA_X": "1"}}


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"commit": "c"}, "commit"),
        ({"sources": "c"}, "sources"),
        ({"environment": {"driver": "570", "CUDA_X": "1"}}, "driver"),
        ({"environment": {"driver": "580"}}, "CUDA_X"),
    ],
)
def test_lines_of_other_code_another_driver_or_other_variables_are_measured_anew(tmp_path, capsys, other, named):
    file = tmp_path / "gpu.json"
    for about in (NOW, NOW, NOW | other):
        begin(["smoke"], file, about, anew=False)
        kept = read(file)
        assert bool(kept["items"]["smoke"]["found"]) == (about is NOW and "seen" in kept)
        lines(kept, "smoke")["lenet5"] = REPORT["items"]["smoke"]["found"]["lenet5"]
        write(file, kept | {"seen": True})
    assert capsys.readouterr().out == f"smoke begins anew, because these are others: {named}\n"


def test_a_report_says_which_code_gave_it(tmp_path):
    said = machine.about("cpu")
    assert len(said["commit"]) == 40 or said["commit"] == "unknown"
    before = machine.sources(tmp_path)
    (tmp_path / "client").mkdir()
    (tmp_path / "client" / "new.py").write_text("1")
    assert machine.sources(tmp_path) != before
    (tmp_path / "client" / "new.txt").write_text("1")
    assert said["sources"] == machine.sources() != before


#: Writes a line, hangs in the second, and writes others, each in a process that ends with it.
HANGING = """
import sys, time
from pathlib import Path
from benchmarks.gpu.report import Lines
line = Lines(Path(sys.argv[1]), sys.argv[2], 1.0)
line("hangs", lambda: time.sleep(600))
for i in range(8):
    line(str(i), lambda: i and sys.exit(4) or 1.0)
"""


@pytest.mark.slow
def test_a_line_that_hangs_and_many_that_end_their_process_cost_themselves(tmp_path, monkeypatch):
    monkeypatch.setitem(items.ITEMS, "steps", 5)
    file = tmp_path / "gpu.json"
    found = run_all(["steps"], file, lambda name: [sys.executable, "-c", HANGING, str(file), name], tiny=False)
    own = found["items"]["steps"]["found"]
    assert list(own) == ["hangs", *map(str, range(8))]
    assert own["hangs"] == {"error": "stopped after 5 seconds; the log says where"}
    assert own["7"] == {"error": "the process ended here (exit code 4)"}
    assert "ended" not in found["items"]["steps"]
    assert "in <lambda>" in file.with_suffix(".log").read_text()  # where it hung


def test_time_for_all_items_ends_in_good_order(tmp_path):
    file = tmp_path / "gpu.json"
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    found = run_all(["smoke", "trace"], file, lambda _: command, tiny=False, seconds=0.5)
    assert faults(found, ["smoke", "trace"]) == [
        "smoke: nothing was measured",
        "smoke: not complete: the time for all items was over",
        "trace: nothing was measured",
        "trace: not begun: the 0.5 seconds were over",
    ]


#: Starts an item that never ends and says which process it is.
STARTING = """
import sys
from pathlib import Path
from benchmarks.gpu.expected import faults
from benchmarks.gpu.items import run_all
from benchmarks.gpu.machine import ended_in_order
item = "import os, time; from benchmarks.gpu.machine import end_with_parent; end_with_parent(); "
item += "print(os.getpid(), flush=True); time.sleep(600)"
with ended_in_order():
    found = run_all(["smoke"], Path(sys.argv[1]), lambda _: [sys.executable, "-c", item], tiny=True)
print(*faults(found), sep="; ", flush=True)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_what_was_started(tmp_path, how):
    command = [sys.executable, "-c", STARTING, str(tmp_path / "gpu.json")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.send_signal(how)
        said = process.stdout.read()
    if how == signal.SIGTERM:
        assert said == "smoke: nothing was measured; smoke: interrupted\n"
    for _ in range(100):  # after SIGKILL the kernel ends it, and whoever inherits it has to take notice
        if not _runs(child):
            break
        time.sleep(0.1)
    assert not _runs(child)


def _runs(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[-1].split()[0] not in {"Z", "X"}
    except OSError:
        return False


def test_one_method_then_all_models_and_the_other_methods_last(monkeypatch):
    order = []
    place = Place(torch.device("cpu"), tiny=False)
    smoke.measure(place, lambda name, _: order.append(name))
    assert order[:2] == ["fedcross engine=local", "fedcross engine=batched"]
    assert order[2:4] == ["lenet5", "lstm"]
    others = ["recurrent layers", "augmentation", "little memory", "deterministic, asked for late"]
    others += ["second GPU", "a worker on each GPU"]
    networks = [f"fedcross {network} {engine}" for network in rounds.NETWORKS if network for engine in ENGINES]
    assert order[2 + len(smoke.MODELS) :] == networks + others
    assert list(items.ITEMS)[-1] == "methods"
    rest = []
    methods.measure(place, lambda name, _: rest.append(name))
    named = {path.stem for path in (CONF / "method").glob("*.yaml")}
    assert {name.split()[0] for name in rest} == named - {"fedcross"}
    assert len(rest) == 2 * len(named) - 2 + 2 * len(methods.NORMED)
    assert rest[-1] == "feddyn own engine=batched"


def test_steps_have_few_recordings(monkeypatch):
    """Each takes long: VGG-16 half a second for its network alone."""
    order = []
    monkeypatch.setattr(steps, "_captured", lambda _place, _made, count: order.append(count))
    monkeypatch.setattr(steps, "_eager", lambda *_: order.append(0))
    monkeypatch.setattr(steps, "_batched", lambda *_, recorded: order.append(int(recorded)))
    steps.measure(Place(torch.device("cuda:0"), tiny=False), lambda _, call: call())
    assert len(order) <= 42
    assert sum(order) <= 63


def test_a_trial_leaves_the_many_methods_out():
    assert program._all(tiny=False) == list(items.ITEMS)
    assert program._all(tiny=True) == list(items.ITEMS)[:-1]


def test_memory_enough_is_a_note_and_the_cards_memory_counts_without_others():
    report = copy.deepcopy(REPORT)
    assert notes(report) == []
    report["items"]["smoke"]["found"]["little memory"] = SHORT | {"captured": GOOD, "at once": 2}
    used = {"used of the card, MB": [900.0 + 9 * i for i in range(20)]}
    report["items"]["graphs"]["found"]["lenet5, 20 rounds"] = FLAT | used | {"other processes": 1}
    assert faults(report) == []
    assert [note.split(":")[:2] for note in notes(report)] == [["smoke", " little memory"]]
    report["items"]["graphs"]["found"]["lenet5, 20 rounds"] = FLAT | used | {"other processes": 0}
    assert len(faults(report)) == 1


def test_other_processes_of_the_card_are_counted(monkeypatch):
    said = "11\n12\n13\n"
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1-2"))
    done = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(machine.subprocess, "run", lambda command, **_: done if "GPU-1-2" in command else None)
    assert machine.other_processes("cuda:0") == 2
    monkeypatch.setattr(machine.subprocess, "run", no_driver)
    assert machine.other_processes("cuda:0") == 0


def test_little_memory_is_what_the_plain_loop_takes(monkeypatch):
    """A tenth more than it has at a time, unless torch takes more for that: then the plain loop needs it."""
    asked = []
    driver = {"empty_cache": lambda: None, "reset_peak_memory_stats": lambda _: None, "synchronize": lambda _: None}
    driver |= {"max_memory_allocated": lambda _: 100, "mem_get_info": lambda _: (0, 1000)}
    for name, value in driver.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, _: asked.append(share))
    for reserved in (105, 130):
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _, most=reserved: most)
        with rare.limited(Place(torch.device("cuda:0"), tiny=True), lambda: None):
            pass
    assert asked == pytest.approx([0.11, 1.0, 0.13, 1.0])


@pytest.mark.slow
def test_no_model_is_left_out_and_those_with_batch_normalisation_are_known():
    assert set(SHAPES) == {path.stem for path in (CONF / "model").glob("*.yaml")}
    networks = {model: build(model) for model in SHAPES}
    normed = {name for name, one in networks.items() if any(isinstance(part, _BatchNorm) for part in one.modules())}
    assert normed == NORMED > DEEP
