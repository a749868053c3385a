"""The resident trainer: it starts on demand and once, stays, comes back after a crash and ends with its keeper."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedcross.client import app as client_app
from fedcross.client.resident import channel
from fedcross.client.resident import connect as warm
from fedcross.client.resident import process as resident
from fedcross.client.resident.connect import Keeper, Resident
from fedcross.core.errors import ConfigError, DataError, FedcrossError, ProtocolError, StorageError
from fedcross.core.paths import import_root
from fedcross.engines.grid import FIRST_NODE, LocalGrid
from fedcross.strategies.wire.records import encode, views

ROOT = import_root()
CONTENT = RecordDict({"arrays": encode({"w": np.arange(5, dtype=np.float32)})})
#: Guards against a hang only: a process may take minutes to start on a loaded machine.
TIME = 600.0


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where trainers write their process ids; sockets lie in a folder whose path is far too long for one."""
    runtime = tmp_path / ("long" * 30)
    runtime.mkdir()
    monkeypatch.setenv(warm.RUNTIME, str(runtime))
    monkeypatch.setenv("ODD_WORK_STARTS", str(tmp_path / "starts"))
    return tmp_path / "starts"


@pytest.fixture
def keeper(starts: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait()
    for pid in pids(starts):
        wait_until(lambda pid=pid: ended(pid))


@pytest.fixture
def trainer(keeper: subprocess.Popen[bytes]) -> Resident:
    return Resident(Keeper.of(keeper.pid), ROOT, "tests.support.odd_work:do")


def pids(starts: Path) -> list[int]:
    return [int(line) for line in starts.read_text().split()] if starts.exists() else []


def ended(pid: int) -> bool:
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()


def wait_until(condition: object, seconds: float = TIME) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def left() -> list[str]:
    """Return what lies in the folder of sockets."""
    with warm.runtime_folder() as folder:
        return os.listdir(folder)  # noqa: PTH208 - of a descriptor


def pid_of(answer: RecordDict) -> int:
    return int(answer.config_records["told"]["pid"])  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_clientapp_imports_nothing_heavy() -> None:
    heavy = [
        "torch",
        "scipy",
        "sklearn",
        "hydra",
        "pydantic",
        "ray",
        "pandas",
        "fedcross.conf.compose",
        "fedcross.client.workshop",
    ]
    code = "import sys, fedcross.client.app, fedcross.client.resident.connect\n"
    code += f"print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_it_starts_on_demand_and_stays(trainer: Resident, starts: Path) -> None:
    first = trainer.do("train", "", CONTENT, TIME)
    second = trainer.do("evaluate", "", CONTENT, TIME)
    assert pid_of(first) == pid_of(second) != os.getpid()
    assert [a.config_records["told"]["task"] for a in (first, second)] == ["train", "evaluate"]
    assert views(first.array_records["arrays"])["w"].tolist() == [0, 1, 2, 3, 4]
    assert pids(starts) == [pid_of(first)]


@pytest.mark.slow
def test_messages_at_once_start_one_trainer(trainer: Resident, starts: Path) -> None:
    answers: list[RecordDict] = []
    threads = [
        threading.Thread(target=lambda: answers.append(trainer.do("train", "", CONTENT, TIME))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {pid_of(answer) for answer in answers} == set(pids(starts))
    assert (len(answers), len(pids(starts))) == (6, 1)


@pytest.mark.slow
def test_a_trainer_that_dies_is_started_again_for_the_same_message(
    trainer: Resident, starts: Path, tmp_path: Path
) -> None:
    answer = trainer.do("train", f"once {tmp_path / 'died'}", CONTENT, TIME)
    assert len(pids(starts)) == 2
    assert pid_of(answer) == pids(starts)[1]


@pytest.mark.slow
def test_a_trainer_that_always_dies_is_an_error_reply_not_a_hang(trainer: Resident, starts: Path) -> None:
    with pytest.raises(ProtocolError, match="ended 2 times"):
        trainer.do("train", "die", CONTENT, TIME)
    assert len(pids(starts)) == warm.ATTEMPTS
    assert pid_of(trainer.do("train", "", CONTENT, TIME)) == pids(starts)[2]


@pytest.mark.slow
def test_our_errors_arrive_as_they_are_and_the_trainer_stays(trainer: Resident, starts: Path) -> None:
    with pytest.raises(DataError, match="no data here"):
        trainer.do("train", "ours", CONTENT, TIME)
    trainer.do("train", "", CONTENT, TIME)
    assert len(pids(starts)) == 1


@pytest.mark.slow
def test_after_a_foreign_error_a_new_trainer_works(trainer: Resident, starts: Path) -> None:
    with pytest.raises(FedcrossError, match="RuntimeError: CUDA error"):
        trainer.do("train", "foreign", CONTENT, TIME)
    trainer.do("train", "", CONTENT, TIME)
    assert len(pids(starts)) == 2


@pytest.mark.slow
def test_prepare_starts_it_and_returns_at_once(trainer: Resident, starts: Path, tmp_path: Path) -> None:
    trainer.prepare(str(tmp_path / "ready"))
    wait_until((tmp_path / "ready").exists)
    assert pid_of(trainer.do("train", "", CONTENT, TIME)) == pids(starts)[0]


@pytest.mark.slow
def test_it_ends_with_its_keeper_even_in_the_middle_of_work(
    trainer: Resident, keeper: subprocess.Popen[bytes], starts: Path, tmp_path: Path
) -> None:
    seen: list[str] = []

    def ask() -> None:
        try:
            trainer.do("train", f"slow {tmp_path / 'busy'}", CONTENT, TIME)
        except ProtocolError as error:
            seen.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_until((tmp_path / "busy").exists)
    keeper.kill()
    keeper.wait()
    wait_until(lambda: ended(pids(starts)[0]))
    thread.join(TIME)
    assert "ended 2 times" in seen[0]  # the second one finds no keeper and ends at once
    assert left() == []


@pytest.mark.slow
def test_it_ends_when_nobody_waits_for_the_answer(trainer: Resident, starts: Path, tmp_path: Path) -> None:
    with trainer._connect(TIME) as connection:
        channel.send(connection, {"task": "train", "overrides": f"slow {tmp_path / 'busy'}"}, CONTENT)
        wait_until((tmp_path / "busy").exists)
    wait_until(lambda: ended(pids(starts)[0]))


@pytest.mark.slow
def test_a_trainer_that_takes_too_long_is_ended(trainer: Resident, starts: Path, tmp_path: Path) -> None:
    trainer.do("train", "", CONTENT, TIME)
    with pytest.raises(ProtocolError, match="did not answer within 1 s"):
        trainer.do("train", f"slow {tmp_path / 'busy'}", CONTENT, 1.0)
    wait_until(lambda: ended(pids(starts)[0]))


@pytest.mark.slow
def test_an_idle_trainer_ends_and_takes_its_socket_along(
    trainer: Resident, starts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(warm.IDLE, "0.1")
    trainer.do("train", "", CONTENT, TIME)
    wait_until(lambda: ended(pids(starts)[0]))
    assert left() == []
    trainer.do("train", "", CONTENT, TIME)
    assert len(pids(starts)) == 2


@pytest.mark.slow
def test_a_signal_ends_it_at_once_and_no_socket_stays(trainer: Resident, starts: Path) -> None:
    trainer.do("train", "", CONTENT, TIME)
    os.kill(pids(starts)[0], signal.SIGTERM)
    wait_until(lambda: ended(pids(starts)[0]))
    assert left() == []


def test_sockets_of_trainers_that_were_killed_are_swept(starts: Path) -> None:
    with warm.runtime_folder() as folder, socket.socket(socket.AF_UNIX) as live, socket.socket(socket.AF_UNIX) as dead:
        live.bind(warm.address(folder, "live"))
        live.listen()
        dead.bind(warm.address(folder, "dead"))
        warm.sweep(folder)
        assert left() == ["live.sock"]


@pytest.mark.slow
def test_only_its_user_can_reach_it(trainer: Resident, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer.do("train", "", CONTENT, TIME)
    [name] = left()
    with warm.runtime_folder() as folder:
        assert stat.S_IMODE(os.fstat(folder).st_mode) == 0o700
        assert stat.S_IMODE(os.stat(name, dir_fd=folder).st_mode) == 0o600
    here, there = socket.socketpair()
    with here, there:
        assert channel.same_user(here)
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not channel.same_user(here)


def test_a_folder_that_others_may_enter_is_refused(starts: Path) -> None:
    with warm.runtime_folder() as folder:
        os.fchmod(folder, 0o750)
    with pytest.raises(StorageError, match="others may enter"), warm.runtime_folder():
        pass


def test_a_link_in_place_of_the_folder_is_refused(
    starts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(warm.RUNTIME, str(tmp_path))
    (tmp_path / f"fedcross-{os.geteuid()}").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    with pytest.raises(StorageError, match="cannot be made or opened"), warm.runtime_folder():
        pass


def test_it_is_wanted_where_flower_starts_a_process_per_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(client_app.CHOICE, raising=False)
    assert not client_app.hands_over()  # a test is no flwr-clientapp, nor are Ray's actors and local workers
    monkeypatch.setattr(sys, "argv", ["/venv/bin/flwr-clientapp", "--token", "x"])
    assert client_app.hands_over()
    monkeypatch.setenv(client_app.CHOICE, "inside")
    assert not client_app.hands_over()
    monkeypatch.setenv(client_app.CHOICE, "cold")
    with pytest.raises(ConfigError, match="choose auto"):
        client_app.hands_over()


def test_a_keeper_is_known_by_its_start_too() -> None:
    own = Keeper.of(os.getpid())
    assert own.started.isdigit()
    assert Resident(own).name != Resident(Keeper(own.pid, "1")).name != Resident(own, work="other:do").name
    assert warm.started(2**22 + 1) == ""  # more than any process id


@pytest.mark.slow
def test_a_keeper_that_has_ended_ends_the_trainer_at_once() -> None:
    code = (
        "import time; from fedcross.client.resident import connect, process\n"
        "process.watch_keeper(connect.Keeper(2**22 + 1, '7'), lambda: print('forgotten', flush=True)); time.sleep(600)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "forgotten\n"


@pytest.mark.slow
def test_a_trainer_that_hangs_while_it_loads_a_run_ends() -> None:
    code = (
        "import socket, threading; from fedcross.client.resident import channel, process\n"
        "here, there = socket.socketpair()\n"
        "channel.send(here, {'task': 'prepare', 'overrides': ''})\n"
        "process.answer(there, lambda *_: threading.Event().wait(600), 0.01)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == resident.FAILED
    assert "loading the run took longer than 0 s, so the trainer stops" in done.stderr


def test_a_run_that_is_loaded_in_time_ends_no_trainer() -> None:
    here, there = socket.socketpair()
    limits: list[bool] = []

    def load(*_: object) -> RecordDict:
        limits.append(any(isinstance(thread, threading.Timer) for thread in threading.enumerate()))
        return RecordDict()

    with here, there:
        channel.send(here, {"task": "prepare", "overrides": ""})
        assert resident.answer(there, load, 1e12)
    assert limits == [True]
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


@pytest.mark.parametrize("seconds", [1e7, 1e10, float("inf")])
def test_a_limit_longer_than_the_system_can_wait_is_cut_down(starts: Path, seconds: float) -> None:
    trainer = Resident()
    reading, writing = os.pipe()
    os.close(writing)
    assert warm.wait_for([reading], seconds) == {reading}
    os.close(reading)
    with warm.runtime_folder() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(warm.address(folder, trainer.name))
        listener.listen()
        with trainer._reach(folder, seconds) as connection:
            assert connection.gettimeout() == warm.LONGEST_SECONDS


def test_foreign_code_in_the_socket_is_not_believed() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert resident.answer(there, lambda *_: RecordDict())


@pytest.mark.slow
def test_the_app_hands_over_in_a_deployment_and_only_there(
    trainer: Resident, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The overrides are no configuration: in this process they would be an error.
    grid = LocalGrid(client_app.app, 1, {"overrides": f"once {tmp_path / 'died'}"})
    (tmp_path / "died").touch()
    content = RecordDict({**CONTENT, "config": ConfigRecord({"client": 0})})
    monkeypatch.setattr(warm, "Resident", lambda: trainer)

    def reply() -> Message:
        [answer] = grid.send_and_receive([Message(content, dst_node_id=FIRST_NODE, message_type="train")])
        return answer

    assert reply().has_error()
    monkeypatch.setenv(client_app.CHOICE, "resident")
    assert pid_of(reply().content) != os.getpid()
