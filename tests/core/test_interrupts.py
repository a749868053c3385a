import contextlib
import os
import signal
import threading
import weakref

import pytest

from fedcross.core.interrupts import watched


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
