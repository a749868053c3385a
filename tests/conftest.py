"""Shared by all tests: nothing global leaks from one test into the next."""

import faulthandler
import gc
import itertools
import logging
import os
import random
import secrets
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.support.strays import left_behind

#: A `make` that a test starts must not take this one, of `make test`, for its own: it would say which folder it enters.
for _name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
    os.environ.pop(_name, None)
#: Torch's threads sleep while they wait for each other: several processes share the cores. Set before torch's import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
#: Files, and folders of files, that one worker runs first. They import transformers, ONNX's exporter, scikit-learn or
#: dynamo, seconds of a core for each, or start federations: the other worker would wait for these at the end.
SLOW_FILES = (
    *("tests/analysis/", "tests/e2e/", "tests/examples/", "tests/tasks/test_own_model.py", "tests/tasks/test_part.py"),
    *("tests/server/test_export.py", "tests/client/test_compiled.py", "tests/client/batched/test_padding.py"),
)
#: Each test begins with this seed, and Hypothesis takes the same examples each time. Another seed, for which Hypothesis
#: takes examples of its own choice, shows which tests pass by luck.
SEED = int(os.environ.get("FEDCROSS_TESTS_SEED", "0"))
#: Ray gives a process of its own this many seconds to start, 30 unless told. A loaded machine takes longer.
os.environ.setdefault("RAY_raylet_start_wait_time_s", "300")


def pytest_configure(config: pytest.Config) -> None:
    """Compose each choice of groups once, and listen to Ctrl-C even where a shell started the tests in the background.

    Such a shell ignores it, processes inherit what is ignored, and several tests interrupt one.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if config.getoption("numprocesses", None):
        return  # this process runs no test: those that pytest-xdist starts do
    gc.set_threshold(20_000, 10, 10)  # nearly all that tests make is gone without the collector
    import hypothesis

    from tests.support.config_files import compose_groups_once

    compose_groups_once()
    if hasattr(config, "workerinput"):
        import torch

        torch.set_num_threads(1)  # another worker has the other core
    # Hypothesis fails a test whose examples take long to make, which is so for any test on a machine with other work.
    calm = {*hypothesis.settings().suppress_health_check, hypothesis.HealthCheck.too_slow}
    hypothesis.settings.register_profile(
        "any load", hypothesis.settings(), deadline=None, suppress_health_check=calm, derandomize=SEED == 0
    )
    hypothesis.settings.load_profile("any load")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Give each test, and the fixtures it is the first to use, the same random numbers wherever it runs."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)


def pytest_unconfigure() -> None:
    """End this process two minutes after the last test at the latest, and say which thread kept it from ending."""
    faulthandler.dump_traceback_later(120, exit=True)
    gc.unfreeze()  # else Triton, which comes with torchvision, reports what is left of it as leaks


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left_behind() -> Iterator[None]:
    """Fail the last test if a process of any test still runs: it could hold the output of CI open for ever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_TESTS", value := secrets.token_hex(8))
        yield
    assert left_behind(f"FEDCROSS_TESTS={value}", patience_s=60) == []


@pytest.fixture(autouse=True)
def _flowers_log() -> Generator[None, None, None]:
    """Let Flower's logger speak: Hydra turns off every logger that it finds, also for the tests after this one.

    What a test adds to it, or Hydra to the root logger, writes to the output of that test, which is closed afterwards.
    """
    logger, root = logging.getLogger("flwr"), logging.getLogger()
    level, handlers, logger.disabled = logger.level, list(logger.handlers), False
    yield
    logger.disabled = False
    if logger.level != level:  # to set it makes every logger forget what it has found out
        logger.setLevel(level)
    logger.handlers[:] = handlers
    root.handlers[:] = [handler for handler in root.handlers if type(handler) is not logging.StreamHandler]


@pytest.fixture(autouse=True)
def _environment() -> Generator[None, None, None]:
    """Take back what a test, or a command that it called here, has set in the environment."""
    before = dict(os.environ)
    yield
    current = os.environ.pop("PYTEST_CURRENT_TEST", None)  # pytest's own
    if (before := {n: v for n, v in before.items() if n != "PYTEST_CURRENT_TEST"}) != dict(os.environ):
        os.environ.clear()
        os.environ.update(before)
    if current is not None:
        os.environ["PYTEST_CURRENT_TEST"] = current


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Let one worker run :data:`SLOW_FILES`, so that their libraries are imported once and no federation comes last."""
    if config.getoption("dist") != "loadfile":
        return None  # as pytest-xdist does it
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = str(super()._split_scope(nodeid))
            return "slow files" if scope.startswith(SLOW_FILES) else scope

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from half a million objects of torch and others, which live until the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(scope="session")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Return folders, one per test, that do not exist yet: most tests write nothing there."""
    base = tmp_path_factory.mktemp("places")
    return (base / str(number) for number in itertools.count())


@pytest.fixture(scope="session")
def digits_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache that holds the digits."""
    from fedcross.tasks.digits import Params, load

    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDCROSS_CACHE", str(folder))
        load(Params.model_validate({}))
    return folder


@pytest.fixture(autouse=True)
def own_places(places: Iterator[Path], digits_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give every test its own client states and Flower home, and the cache with the digits."""
    own = next(places)
    monkeypatch.setenv("FEDCROSS_STATE", str(own / "client-states"))
    monkeypatch.setenv("FEDCROSS_CACHE", str(digits_cache))
    monkeypatch.setenv("FLWR_HOME", str(own / "flwr"))
    monkeypatch.delenv("FEDCROSS_PATH", raising=False)
    yield
    if "fedcross.client.cache" in sys.modules:
        sys.modules["fedcross.client.cache"]._open.clear()
        sys.modules["fedcross.tasks.data"]._loaded.clear()
