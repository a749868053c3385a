"""Stands for Python, or for a program of Flower, in the folder of :func:`tests.support.warm.programs`.

It asks the tests' zygote (:mod:`tests.support.zygote`) to fork a process with this one's arguments, environment,
folder and open files. For whoever started it, it then is that process: it passes signals on and ends as the other one
does, and if it is killed so is the other one. This costs 20 ms; the imports that it saves cost seconds.

Its first line names the real Python, and the zygote's door lies beside it.
"""

import json
import os
import select
import signal
import socket
import sys

PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# The module pathlib, and what it imports, would take longer than all the rest.
# ruff: noqa: PTH109, PTH118, PTH120, PTH208


def opened() -> list[int]:
    """Return the numbers of the files that this process was started with."""
    found = []
    for number in map(int, os.listdir("/proc/self/fd")):
        try:
            if os.get_inheritable(number):
                found.append(number)
        except OSError:  # the listing's own
            continue
    return found


def request(numbers: list[int]) -> bytes:
    """Return what the zygote has to know; the `numbers` are those of the files that it gets."""
    folder, program = os.path.split(sys.argv[0])
    script = [] if program == "python" else [os.path.join(os.path.dirname(sys.executable), program)]
    mask = os.umask(0o077)
    os.umask(mask)
    # Ray looks at the processes that it starts itself: those are new.
    python = sys.executable if program == "flwr-simulation" else os.path.join(folder, "python")
    known = {"executable": python, "env": dict(os.environ), "cwd": os.getcwd(), "umask": mask}
    # A session of its own: what is sent to this one's group reaches it from here, and once.
    asked = {"arguments": [*script, *sys.argv[1:]], "numbers": numbers, "start_new_session": True}
    return json.dumps({**known, **asked}).encode()


def stand_for() -> int:
    """Have the process forked, and stand for it until it ends; return its wait status."""
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    line.connect(os.path.join(os.path.dirname(sys.argv[0]), "door"))
    numbers = opened()
    socket.send_fds(line, [request(numbers)], numbers)
    for number in numbers:
        os.close(number)
    other, signals = 0, bytearray()
    while True:
        ready, _, _ = select.select([line, woken], [], [])
        if woken in ready:
            signals += woken.recv(4096)
        if line in ready:
            if not (said := line.recv(4096)):
                return int(signal.SIGKILL)  # the tests are gone, and what they started ends with them
            kind, number, *status = json.loads(said)
            if kind == "ended":
                return int(status[0])
            other = number
        while other and signals:
            os.kill(other, signals.pop(0))


def end(status: int) -> None:
    """End as a process with this wait status has ended."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    end(stand_for())
