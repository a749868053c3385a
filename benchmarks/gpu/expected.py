"""What each line of a report should say: whatever does not is a fault, and the exit code is 1.

A line may not be an error, every number must be finite, and what was not measured is a fault too. What else is expected
of a line depends on its item.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.gpu.report import Found

#: What a line says in place of a result that needs a second GPU, and that a CPU without bfloat16 there does not give.
ONE, LACKS = "one GPU only", "not on this CPU"

#: Line of `smoke` -> why its steps need not be recorded on a GPU. On the emulated GPU all were.
UNRECORDED = {"little memory": "it is too little for that"}
#: Models with batch normalisation. It divides by what it sums, so its differences grow from step to step.
NORMED = {"resnet20", "resnet20_lab", "resnet18", "vgg16_bn", "torchvision", "own"}
#: Those of them where a CPU with one thread and one with two are .12 and .67 of the change apart after these steps, and
#: a weight 1e-3 and 7e-3: this only shows that nothing diverges.
DEEP = {"resnet18", "vgg16_bn"}
#: How far the weights of two trainers on one device may be apart after five steps, at rate 0.01, which change a weight
#: by 3e-3 at most. On a CPU 1e-8, with batch normalisation 3e-5.
TRAINERS = 1e-4
#: How long the difference from the CPU's weights may be then, as a share of what these steps change. A CPU with other
#: kernels: 5e-6; 3e-3 where a sum next to zero changes its sign before a ReLU; with batch normalisation 4e-3.
SHARE, NORMED_SHARE, DEEP_SHARE, DEEP_TRAINERS = 1e-2, 3e-2, 1.5, 1e-2
#: The largest difference from the CPU's local engine after two rounds of a method. On a CPU the batched engine's is
#: 2e-7; 8e-4 for FedDecorr, which divides by the deviation of each dimension, and 5e-4 for FedFusion's network, which
#: pools: both can turn over at the last bit. On an H200 1.5e-7, but FedDecorr's .013 locally: as much as it moves
#: a weight, so its limit only shows that nothing diverges.
METHODS, TURNING = 1e-3, {"feddecorr": 3e-2, "fedfusion": 1e-2}
#: How far these two rounds move a weight at least; it is .016 (FedLC) to .075.
MOVED = 1e-2
#: Methods without a global model that trains: their lines only say whether steps were recorded.
UNMOVED = ("solo",)
#: The same from the CPU's float32 after ten steps, for each precision; they move a weight by .0023 to .0047. TF32 done
#: by a CPU is 3e-5, its bfloat16 1e-4.
FROM_CPU = {"float32": 1e-4, "tf32": 3e-4, "bfloat16": 5e-4}
#: The same of a model with batch normalisation: they move ResNet-20's by .033; TF32 is 2.6e-4 there, bfloat16 7e-4.
NORMED_FROM_CPU = {"float32": 3e-3, "tf32": 3e-3, "bfloat16": 5e-3}
#: How far a convolution and a product are from float64's in each precision, at least and at most. The factors have 23,
#: 10 and 7 bits: 1e-6, 3e-4 and 2e-3.
ROUNDING = {"float32": (0.0, 3e-5), "tf32": (3e-5, 7e-4), "bfloat16": (7e-4, 3e-2)}
#: How far tf32 and bfloat16, whose numbers have 10 and 7 bits, are from it at least, for these models.
ROUNDED, CONVOLUTIONS = 1e-7, ("lenet5", "resnet20")
#: How many times as far apart a model with batch normalisation may be.
NORMALISED = 30.0
#: How much memory may grow in the last ten of twenty rounds: a share, and the smallest piece that torch takes, in MB.
GROWTH, PIECE = 0.01, 2.0


def faults(report: Found, asked: Sequence[str] | None = None) -> list[str]:
    """Return what is not as expected in the items `asked` (default: those in the report), each with its place."""
    gpu = report.get("device", "cpu") != "cpu"
    items, found = report.get("items", {}), []
    for item in items if asked is None else asked:
        part = items.get(item, {})
        if not part.get("found"):
            found.append(f"{item}: nothing was measured")
        for line, value in part.get("found", {}).items():
            found += [f"{item}: {line}: {fault}" for fault in broken(item, line, value, gpu=gpu)]
        if "ended" in part:
            found.append(f"{item}: {part['ended']['error']}")
    return found


def broken(item: str, line: str, value: Any, *, gpu: bool) -> list[str]:
    """Return in what `value`, a line of `item`, is not as expected on a GPU or a CPU."""
    if isinstance(value, dict) and "error" in value:
        return [value["error"]]
    if odd := [place for place, number in _numbers(value) if not math.isfinite(number)]:
        return [f"not finite: {', '.join(odd)}"]
    return list(_EXPECTED.get(item, _times)(line, value, gpu))


def recorded(report: Found) -> list[str]:
    """Return a table of the lines that say whether their steps were recorded: those that were, others by reason."""
    table: dict[str, list[str]] = defaultdict(list)
    for item, part in report.get("items", {}).items():
        for line, value in part.get("found", {}).items():
            for way, one in _recordings(value):
                reason = "recorded" if one["ran"] == "recorded" else f"not recorded: {'; '.join(one['reasons'])}"
                table[reason].append(f"{item} {line}{way}")
    return [f"{len(names)} {reason}: {', '.join(names)}" for reason, names in table.items()]


def notes(report: Found) -> list[str]:
    """Return what is no fault and yet says less than it should."""
    short = report.get("items", {}).get("smoke", {}).get("found", {}).get("little memory", {})
    ways = [one["ran"] == "recorded" for _, one in _recordings(short)]
    if ways and all(ways) and short.get("at once", 0) > 1:
        return ["smoke: little memory: there was enough, for torch takes memory in large pieces, so this shows nothing"]
    return []


def _recordings(value: Any) -> Iterator[tuple[str, Found]]:
    """Yield where `value` says whether steps were recorded, and what it says."""
    if isinstance(value, dict):
        if "ran" in value:
            yield "", value
        yield from ((f" ({way})", one) for way, one in value.items() if isinstance(one, dict) and "ran" in one)


def _numbers(value: Any, place: str = "value") -> Iterator[tuple[str, float]]:
    """Yield all numbers in `value`, each with its place."""
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _numbers(one, name)
    elif isinstance(value, list):
        for one in value:
            yield from _numbers(one, place)
    elif isinstance(value, int | float):
        yield place, value


def _trace(line: str, value: Any, gpu: bool) -> Iterator[str]:
    """Expect operations, on a GPU its kernels: without CUPTI, or the permission to use it, there are none."""
    yield from _times(line, value, gpu)
    if value and not value.get("dearest, us"):
        yield "no operation was seen"


def _times(_line: str, value: Any, _gpu: bool) -> Iterator[str]:
    """Expect times, or other numbers above zero."""
    numbers = list(_numbers(value))
    if not numbers:
        yield f"no number: {value!r}"
    if low := [place for place, number in numbers if number <= 0]:
        yield f"not above zero: {', '.join(low)}"


def _smoke(line: str, value: Any, gpu: bool) -> Iterator[str]:
    """Expect recorded steps on a GPU, trainers that agree, and the arithmetic that was asked for."""
    if line == "augmentation":
        if value != [8, 3, 32, 32]:
            yield f"shape {value}, not [8, 3, 32, 32]"
    elif line == "recurrent layers":
        if missing := {"float32", "bfloat16"} - value.keys():
            yield f"not measured: {', '.join(sorted(missing))}"
        if wrong := {kind: found for kind, found in value.items() if kind != found and (gpu or found != LACKS)}:
            yield f"computed in another type: {wrong}"
    elif line == "deterministic, asked for late":
        if "lenet5" not in value:
            yield "not measured: lenet5"
        yield from (f"{model}: another result the second time" for model, same in value.items() if same is not True)
    elif value == ONE:
        return
    elif line == "a worker on each GPU":
        yield from _from_cpu(value["from CPU"], METHODS)
    elif not any(_recordings(value)):
        yield f"does not say whether steps were recorded: {value!r}"
    else:
        yield from _recorded(line, value, gpu)
        if "ran" in value:
            if "from CPU" not in value:
                yield "not compared with the CPU"
            if not line.startswith(UNMOVED):
                yield from _moved(value)
            yield from _from_cpu(value.get("from CPU", 0.0), _limit(line))
        else:
            yield from _near(line, value)


def _limit(line: str) -> float:
    """Return how far the model of a method's `line` may be from the CPU's."""
    return next((most for name, most in TURNING.items() if line.startswith(name)), METHODS)


def _near(model: str, value: Any) -> Iterator[str]:
    """Expect trainers that agree with each other and with the CPU."""
    normed = model in NORMED or model == "little memory"
    most, share = (TRAINERS * NORMALISED, NORMED_SHARE) if normed else (TRAINERS, SHARE)
    if model in DEEP:
        most, share = DEEP_TRAINERS, DEEP_SHARE
    yield from (f"{way}: {far} apart, more than {most}" for way, far in value["apart"].items() if far > most)
    shares = value.get("share of CPU's change", {})
    yield from (f"{way}: {far} of the CPU's change, more than {share}" for way, far in shares.items() if far > share)


def _moved(value: Any) -> Iterator[str]:
    """Expect that the method changed the model: of one that stays as it was, any GPU is near the CPU's."""
    if value.get("moved on CPU", 1.0) < MOVED:
        yield f"the method changes a weight by {value['moved on CPU']} only, so this says nothing"


def _from_cpu(far: float, most: float) -> Iterator[str]:
    if far > most:
        yield f"{far} from the CPU, more than {most}"


def _recorded(line: str, value: Any, gpu: bool) -> Iterator[str]:
    for way, one in _recordings(value):
        if gpu and line not in UNRECORDED and (one["ran"] != "recorded" or one["replays"] < 1):
            yield f"not recorded{way}: {'; '.join(one.get('reasons', ['no step was replayed']))}"


def _accuracy(line: str, value: Any, gpu: bool) -> Iterator[str]:
    """Expect the CPU's bytes, weights near the CPU's, and twice the same where that was asked for."""
    if line == "bytes prepared as on the CPU":
        if value is not True:
            yield "they are not"
        return
    model, precision = line.split(",")[0].split()
    if model == "arithmetic":
        yield from _rounding(precision if gpu or precision != "tf32" else "float32", value)
        return
    if value == LACKS:
        if gpu:
            yield f"not measured: {LACKS}"
        return
    most = (NORMED_FROM_CPU if model in NORMED else FROM_CPU).get(precision, METHODS)
    if gpu and precision != "float32" and model in CONVOLUTIONS and value["from CPU"] < ROUNDED:
        yield f"{value['from CPU']} from the CPU's float32: this was not computed in {precision}"
    yield from _from_cpu(value["from CPU"], METHODS if model == "fedgen" else most)
    if value["same twice"] is not True and (line.endswith(", deterministic") or not gpu):
        yield "another result the second time"


def _rounding(precision: str, value: Any) -> Iterator[str]:
    """Expect the arithmetic that was asked for, not a finer or a coarser one."""
    least, most = ROUNDING[precision]
    if missing := {"convolution", "product"} - value.keys():
        yield f"not measured: {', '.join(sorted(missing))}"
    for what, far in value.items():
        if not least <= far <= most:
            yield f"{what}: {far} from float64, not {least} to {most} as in {precision}"


def _graphs(line: str, value: Any, gpu: bool) -> Iterator[str]:
    """Expect recorded steps, and memory that no longer grows."""
    if not gpu:
        return
    if not line.endswith(", 20 rounds"):
        yield from _times(line, value, gpu)
        return
    yield from _recorded(line, value, gpu)
    others = ["used of the card, MB"] if not value.get("other processes") else []  # theirs counts there too
    for name in ("reserved, MB", "kept by graphs, MB", *others):
        before, *rest = value[name][-10:]
        if max(rest) - before > max(GROWTH * before, PIECE):
            yield f"{name}: from {before} to {max(rest)} in the last ten rounds"


_EXPECTED: dict[str, Callable[[str, Any, bool], Iterator[str]]] = {
    "smoke": _smoke,
    "methods": _smoke,
    "accuracy": _accuracy,
    "graphs": _graphs,
    "trace": _trace,
}
