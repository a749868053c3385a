"""The methods of conf/method, and those of them that show something about a client's device."""

from __future__ import annotations

from fedcross.conf.compose import CONF
from tests.support.scale import WHOLE

METHODS = sorted(path.stem for path in (CONF / "method").glob("*.yaml"))
#: Their clients do what FedAvg's do, with the same network, as tests/client/test_precision.py asserts; what the server
#: does besides is NumPy, whatever device and precision the clients have. FedAvg, FedCross, its propellers and its
#: asynchronous form stay.
CLIENTS_OF_FEDAVG = (
    *("clusamp", "daisychain", "fedasync", "fedbuff", "fedcross_dynamic_alpha", "fedcross_first_stage"),
    *("fedcross_pm_da", "fedexp", "fedfan", "fedmr", "fedmut", "gitfl", "masterpull"),
)
#: Methods for a test of the clients' half; ``FEDCROSS_RELIABILITY=whole``: all.
CLIENTS = [name for name in METHODS if WHOLE or name not in CLIENTS_OF_FEDAVG]
