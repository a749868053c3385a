import contextlib
import os
import signal
import threading
import weakref

import pytest

from fedcross.core.interrupts import asked_to_end, watched
from fedcross.engines.processes import terminated_by_signal


class Thing:
    pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_drops_is_seen():
    before = signal.getsignal(signal.SIGINT)
    with watched() as interrupted:
        thing = Thing()
        weakref.finalize(thing, os.kill, os.getpid(), signal.SIGINT)
        with contextlib.suppress(KeyboardInterrupt):
            del thing  # the exception is raised inside the callback
        assert interrupted.is_set()
    assert signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_is_raised_as_before():
    with pytest.raises(KeyboardInterrupt), watched() as interrupted:
        assert not interrupted.is_set()
        os.kill(os.getpid(), signal.SIGINT)


def test_other_threads_only_never_see_one():
    found = []

    def work():
        with watched() as interrupted:
            found.append(interrupted.is_set())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_the_first_sigterm_ends_a_command_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), asked_to_end() as asked:
        assert not asked.is_set()
        with terminated_by_signal():  # an engine's own handler does not come before the command's
            signal.raise_signal(signal.SIGTERM)
    assert asked.is_set()
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_the_program_does_on_sigterm_stays():
    came = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append(1))
    try:
        with asked_to_end() as asked:
            signal.raise_signal(signal.SIGTERM)
        assert came
        assert not asked.is_set()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_sigterm_that_python_drops_is_seen():
    with asked_to_end(), watched() as interrupted:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
        assert interrupted.is_set()
