import contextlib
import os
import signal
import weakref

import pytest

from fedcross.engines.processes import terminated_by_signal
from fedcross.server.interrupts import asked_to_end, watched


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


def test_the_first_sigterm_ends_a_command_as_ctrl_c_does():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), asked_to_end() as asked, watched() as interrupted:
        assert not asked.is_set()
        with terminated_by_signal():  # an engine's own handler does not come before the command's
            signal.raise_signal(signal.SIGTERM)
    assert asked.is_set()
    assert interrupted.is_set()
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
