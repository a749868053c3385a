"""A client app whose chosen clients answer wrongly, in fifteen ways."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedcross.client.app import app as honest
from fedcross.strategies.wire.records import encode
from tests.support.replies import reply

HUGE = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }".ljust(117)
    + b"\n"
)


def _arrays(message: Message) -> dict[str, Any]:
    return {name: array.numpy() for name, array in message.content.array_records["arrays"].items()}


def _first(arrays: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    name = next(iter(arrays))
    return {**arrays, name: change(arrays[name].copy())}


def _valued(value: float) -> Callable[[Any], Any]:
    def put(array: Any) -> Any:
        array.flat[0] = value
        return array

    return put


def _with_arrays(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Message], Message]:
    return lambda message: reply(message, change(_arrays(message)), {}, 10, {"train-loss": 1.0})


def _with_bytes(make: Callable[[Any], Array]) -> Callable[[Message], Message]:
    """Return a reply whose first array is replaced by a hand-made one."""

    def bad(message: Message) -> Message:
        answer = reply(message, _arrays(message), {}, 10, {})
        record = answer.content.array_records["arrays"]
        name = next(iter(record))
        answer.content["arrays"] = ArrayRecord({**dict(record), name: make(record[name])})
        return answer

    return bad


def _with_config(**values: Any) -> Callable[[Message], Message]:
    def bad(message: Message) -> Message:
        answer = reply(message, _arrays(message), {}, 10, {})
        answer.content["config"] = ConfigRecord({**answer.content.config_records["config"], **values})
        return answer

    return bad


def _with_metrics(record: Any) -> Callable[[Message], Message]:
    def bad(message: Message) -> Message:
        answer = reply(message, _arrays(message), {}, 10, {})
        answer.content["metrics"] = record
        return answer

    return bad


def _small(array: Any) -> Array:
    """A payload of one value that is declared as the whole array."""
    return Array(array.dtype, array.shape, array.stype, encode({"a": np.zeros((1, 1), np.float32)})["a"].data)


def _empty(message: Message) -> Message:
    return Message(RecordDict(), reply_to=message)


#: Kind -> (what it answers, the guard's reason).
KINDS: dict[str, tuple[Callable[[Message], Message], str]] = {
    "nan": (_with_arrays(lambda a: _first(a, _valued(np.nan))), "non_finite"),
    "infinity": (_with_arrays(lambda a: _first(a, _valued(np.inf))), "non_finite"),
    "shape": (_with_arrays(lambda a: _first(a, lambda x: x.reshape(-1)[:-1])), "wrong_shape"),
    "missing": (_with_arrays(lambda a: dict(list(a.items())[1:])), "missing_array"),
    "extra": (_with_arrays(lambda a: {**a, "backdoor": np.zeros(3, np.float32)}), "extra_array"),
    "complex": (_with_arrays(lambda a: _first(a, lambda x: x.astype(np.complex128))), "wrong_dtype"),
    "float64": (_with_arrays(lambda a: _first(a, lambda x: x.astype(np.float64))), "wrong_dtype"),
    "broadcast": (_with_bytes(_small), "malformed_array"),
    "garbage": (_with_bytes(lambda a: Array(a.dtype, a.shape, a.stype, b"\x93NUMPY garbage")), "malformed_array"),
    "huge": (_with_bytes(lambda a: Array(a.dtype, a.shape, a.stype, HUGE)), "malformed_array"),
    "examples": (_with_metrics(MetricRecord({"num-examples": -3})), "bad_examples"),
    "text": (_with_metrics(ConfigRecord({"num-examples": "many"})), "malformed_message"),
    "metric": (_with_metrics(MetricRecord({"num-examples": 3, "train-loss": float("nan")})), "bad_metrics"),
    "replay": (_with_config(nonce="0" * 32), "wrong_nonce"),
    "empty": (_empty, "malformed_message"),
}


def malicious(bad: Callable[[int], bool], *, silent: bool = False) -> tuple[ClientApp, list[str]]:
    """Return an app and the list of the kinds it has answered with.

    Clients for which ``bad(client)`` holds answer with one kind after another; with `silent` they fail instead.
    """
    app, sent = ClientApp(), []
    kinds = itertools.cycle(KINDS)

    @app.train()
    def train(message: Message, context: Any) -> Message:
        if not bad(int(message.content.config_records["config"]["client"])):  # type: ignore[arg-type]
            return honest(message, context)
        if silent:
            raise RuntimeError("gone")
        sent.append(next(kinds))
        return KINDS[sent[-1]][0](message)

    return app, sent
