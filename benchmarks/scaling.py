"""Time and memory of a round against the federation's size, the clients drawn and the model; and a check for leaks.

::

    python -m benchmarks.scaling            # writes docs/performance.md
    python -m benchmarks.scaling --leak     # 300 rounds, slope of resident memory
    python -m benchmarks.scaling --leak --ray   # the same of Ray's client actors and the server on Ray
    python -m benchmarks.scaling --dry --quick

Every row runs in a new process, so that its memory is not that of another row. Clients hold 20 random 3x32x32 images
each and train for one epoch: cost must grow with the work (K times steps), not with the number of clients. The start
includes all imports; the images were decoded before, as in every start of a data set but its first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.common import WORKLOADS, Ours, images, machine, overrides, write_section

EXAMPLES = 20
CASES = [
    *((n, 10, "lenet5") for n in (10, 100, 1_000, 10_000)),
    *((100, k, "lenet5") for k in (5, 20, 50, 100)),
    *((100, 10, model) for model in ("cnn_w", "resnet18", "vgg16_bn")),
]
WEIGHTS = {"lenet5": "62k", "cnn_w": "0.9M", "resnet18": "11M", "vgg16_bn": "34M"}
LEAK_LIMIT = 1.0  # MiB per 100 rounds


DECODE = "import sys; from fedcross.conf.schema import load; load(sys.argv[1:]).load_data()"


def resident(pid: int) -> float:
    """Return the unshared memory of a process (RssAnon), MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


def one(clients: int, drawn: int, model: str, rounds: int) -> dict[str, float]:
    """Run a case in this process."""
    work = replace(WORKLOADS["lenet5"], model=model, clients=clients, drawn=drawn, examples=EXAMPLES, epochs=1)
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as name:
        folder = Path(name)
        os.environ["FEDCROSS_STATE"], os.environ["FEDCROSS_CACHE"] = str(folder / "state"), str(folder / "cache")
        images(work, folder)
        settings = overrides(work, folder, folder / "run", "evaluate_every=1000000")
        subprocess.run([sys.executable, "-c", DECODE, *settings], check=True, stdout=subprocess.DEVNULL)
        start, start_cpu = time.perf_counter(), time.process_time()
        run = Ours(settings, workers=1)
        begun = {"start": time.perf_counter() - start, "start_cpu": time.process_time() - start_cpu}
        try:
            run.round()
            times, cpus = [], []
            for _ in range(rounds):
                before, before_cpu = time.perf_counter(), time.process_time()
                run.round()
                times.append(time.perf_counter() - before)
                cpus.append(time.process_time() - before_cpu)
            return {**begun, "round": median(times), "cpu": median(cpus), "memory": resident(os.getpid())}
        finally:
            run.close()


def leak(rounds: int, workers: int) -> dict[str, float]:
    """Return the slope of memory, MiB per 100 rounds, of the server and of all workers together."""
    work = replace(WORKLOADS["lenet5"], clients=50, examples=EXAMPLES, epochs=1)
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as name:
        folder = Path(name)
        os.environ["FEDCROSS_STATE"], os.environ["FEDCROSS_CACHE"] = str(folder / "state"), str(folder / "cache")
        images(work, folder)
        run = Ours(overrides(work, folder, folder / "run"), workers)
        try:
            server, others = [], []
            for number in range(rounds):
                run.round()
                if number >= rounds // 6:  # caches fill first
                    server.append(resident(os.getpid()))
                    others.append(sum(resident(pid) for pid in run.pids[1:]))
            steps = np.arange(len(server))
            slopes = [float(np.polyfit(steps, series, 1)[0]) * 100 for series in (server, others)]
            return {"rounds": rounds, "server": slopes[0], "workers": slopes[1]}
        finally:
            run.close()


def ray_leak(rounds: int) -> dict[str, float]:
    """Return the slope of memory, MiB per 100 rounds, of the ServerApp's process and of Ray's actors together."""
    work = replace(WORKLOADS["lenet5"], clients=50, examples=EXAMPLES, epochs=1)
    with tempfile.TemporaryDirectory(prefix="fedcross-bench-") as name:
        folder = Path(name)
        images(work, folder)
        settings = [s for s in overrides(work, folder, folder / "run") if not s.startswith("rounds=")]
        own = {"FEDCROSS_STATE": str(folder / "state"), "FEDCROSS_CACHE": str(folder / "cache")}
        command = [sys.executable, "-m", "fedcross", *settings, "engine=ray", f"rounds={rounds}"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, env={**os.environ, **own}, stdout=log, stderr=subprocess.STDOUT)
        done, series = 0, []
        while process.poll() is None:
            lines = folder / "run" / "metrics.jsonl"
            now = lines.read_text().count("\n") if lines.exists() else 0
            if now > done and now >= rounds // 6:
                server, actors = _on_ray()
                series.append((now, server, actors))
            done = max(done, now)
            time.sleep(0.2)
        if process.returncode:
            raise RuntimeError((folder / "log").read_text()[-2000:])
    steps, *columns = (np.array(column) for column in zip(*series))
    slopes = [float(np.polyfit(steps, column, 1)[0]) * 100 for column in columns]
    return {"rounds": rounds, "server": slopes[0], "workers": slopes[1]}


def _on_ray() -> tuple[float, float]:
    """Return the memory of the process that runs the ServerApp on Ray, and of all client actors, MiB."""
    server = actors = 0.0
    for place in Path("/proc").glob("[0-9]*"):
        try:
            title = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            if title.startswith("ray::ClientAppActor"):
                actors += resident(int(place.name))
            elif "flwr-simulation" in title:
                server += resident(int(place.name))
        except (OSError, IndexError):
            continue  # ended in the meantime
    return server, actors


def apart(*arguments: str) -> dict[str, float]:
    """Run this module with `arguments` in a new process and return its measurements."""
    command = [sys.executable, "-m", "benchmarks.scaling", *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def scaling_table(rounds: int, *, quick: bool) -> str:
    """Return all cases as Markdown."""
    lines = [
        "| clients | K | model | start, s | start, CPU s | round, s | round, CPU s | memory, MiB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for clients, drawn, model in CASES:
        if quick and (model == "vgg16_bn" or drawn > 50):
            continue
        case = apart("--case", str(clients), str(drawn), model, "--rounds", str(rounds))
        values = (f"{case[key]:.3g}" for key in ("start", "start_cpu", "round", "cpu"))
        cells = (str(clients), str(drawn), f"{model} ({WEIGHTS[model]})", *values, f"{case['memory']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=None, help="rounds per case (5), or of the check for leaks (300)")
    parser.add_argument("--workers", type=int, default=2, help="of the check for leaks")
    parser.add_argument("--leak", action="store_true")
    parser.add_argument("--ray", action="store_true", help="the check for leaks on Ray")
    parser.add_argument("--quick", action="store_true", help="without the largest cases")
    parser.add_argument("--dry", action="store_true", help="print only, leave docs/performance.md as it is")
    parser.add_argument("--case", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.case:
        print(json.dumps(one(int(given.case[0]), int(given.case[1]), given.case[2], given.rounds)))
        return
    if given.leak:
        rounds = given.rounds or 300
        found = ray_leak(rounds) if given.ray else leak(rounds, given.workers)
        who = "engine=ray, its actors being the" if given.ray else f"engine=local, {given.workers}"
        text = (
            f"Slope of unshared memory over {rounds} rounds (the first sixth left out), {who} "
            f"workers: server {found['server']:+.2f} MiB, all workers {found['workers']:+.2f} MiB per 100 rounds "
            f"(limit {LEAK_LIMIT:.0f})."
        )
        print(text)
        if not given.dry:
            write_section("leak ray" if given.ray else "leak", f"## Memory over many rounds\n\n{text}\n\n{machine()}")
        return
    text = scaling_table(given.rounds or 5, quick=given.quick)
    if not given.dry:
        write_section("scaling", f"## Scaling\n\n{machine()}\n\n{text}")


if __name__ == "__main__":
    main()
