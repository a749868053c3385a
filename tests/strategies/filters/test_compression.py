"""Compression: numbers by hand, error feedback over messages, malformed encodings, whole runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fedcross.client.app import app as client_app
from fedcross.client.cache import run_cache
from fedcross.client.request import carry_out, state_root
from fedcross.client.state import StateStore
from fedcross.conf.compose import join
from fedcross.core.errors import UploadError
from fedcross.engines.grid import identify
from fedcross.strategies.filters import compression
from fedcross.strategies.filters.compression import ClientHalf, Compression, CompressionFilter, code, decode
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.round.packing import pack, unpack
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.wire import records
from fedcross.strategies.wire.records import SCALES, views
from tests.support.federation import SMALL, run
from tests.support.replies import payload_of

ROUND = Round(1, 0, (0,), 0)

INT8 = ("compression.down=int8", "compression.up=int8")
FLOATS = st.floats(-1e3, 1e3, width=32)


def coded_and_back(values: Any, kind: Any) -> Any:
    arrays, scales = code(values, kind)
    return arrays, scales, decode(arrays, scales)


def f32(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_int8_by_hand() -> None:
    # max|x| = 1.27, so s = 0.01; -0.635 / s = -63.5 is a tie and goes to the even -64, 0.004 / s = 0.4 to 0.
    coded, scales, decoded = coded_and_back({"w": f32(0, 1.27, -0.64, 0.004)}, "int8")
    assert coded["w"].dtype == np.int8
    assert coded["w"].tolist() == [0, 127, -64, 0]
    assert scales[SCALES] == pytest.approx([0.01])
    assert decoded["w"] == pytest.approx([0, 1.27, -0.64, 0])
    # With a largest value of 127, s = 1, and the ties 0.5, 1.5 and -2.5 go to the even neighbours.
    assert code({"w": f32(127, 0.5, 1.5, -2.5)}, "int8")[0]["w"].tolist() == [127, 0, 2, -2]


def test_blocks_have_scales_of_their_own_and_zeros_stay_zero() -> None:
    values = np.zeros(2 * compression.BLOCK + 1, np.float32)
    values[3], values[-1] = 127, 1270
    coded, scales, decoded = coded_and_back({"b": values, "a": f32(254)}, "int8")
    assert scales[SCALES].tolist() == [2, 1, 0, 10]  # in the order of the names: a has one block, b three
    assert np.flatnonzero(coded["b"]).tolist() == [3, 2 * compression.BLOCK]
    assert decoded["b"].tolist() == values.tolist()


def test_float16_by_hand() -> None:
    # 1 + 2^-11 lies halfway between 1 and 1 + 2^-10 and goes to the even one; 70000 exceeds the range.
    coded, scales, decoded = coded_and_back({"w": f32(1 + 2**-11, 70000, -0.5)}, "float16")
    assert coded["w"].dtype == np.float16
    assert scales == {}
    assert decoded["w"].tolist() == [1, 65504, -0.5]
    values = {"w": f32(1 + 2**-11, 70000, -0.5)}
    residual = compression.compressed(values, {"w": f32(0, 0, 0)}, {}, "float16")[2]
    assert residual["w"].tolist() == [2**-11, 4496, 0]


@pytest.mark.parametrize("kind", ["float16", "int8"])
@settings(max_examples=50, deadline=None)
@given(values=npst.arrays(np.float32, npst.array_shapes(min_dims=0, max_dims=3, min_side=0), elements=FLOATS))
def test_the_error_is_half_a_step(kind: Any, values: np.ndarray) -> None:
    decoded = coded_and_back({"w": values}, kind)[2]
    assert decoded["w"].shape == values.shape
    largest = np.abs(values).max(initial=0)
    step = largest / 127 if kind == "int8" else max(largest * 2**-10, 2**-24)
    assert np.abs(decoded["w"] - values).max(initial=0) <= 0.501 * step + 1e-30


@pytest.mark.parametrize("kind", ["float16", "int8"])
@settings(max_examples=30, deadline=None)
@given(steps=st.lists(npst.arrays(np.float32, 7, elements=FLOATS), min_size=1, max_size=8))
def test_what_is_sent_adds_up_to_what_was_meant_but_for_the_last_residual(kind: Any, steps: list[np.ndarray]) -> None:
    half = ClientHalf(Compression(up=kind), {"w": np.zeros(7, np.float32)})
    base, residual = {"w": np.zeros(7, np.float32)}, {}
    sent = np.zeros(7)
    for step in steps:
        arrays, scales, residual = half.upload({"w": step}, base, residual)
        sent += decode(arrays, scales)["w"]
    assert sent + residual["w"] == pytest.approx(np.sum(steps, axis=0, dtype=np.float64), abs=0.01, rel=1e-5)


def test_only_float32_parameters_are_coded() -> None:
    initial = {"w": f32(1, 2), "d": np.ones(2)}
    half = ClientHalf(Compression(up="int8"), initial)
    trained = {"w": f32(2, 4), "d": np.zeros(2), "running_var": f32(3), "n": np.array(7)}
    arrays, scales, residual = half.upload(trained, {**trained, "w": f32(1, 2)}, {})
    assert {name: str(a.dtype) for name, a in arrays.items()} == {
        "w": "int8", "d": "float64", "running_var": "float32", "n": "int64",
    }  # fmt: skip
    assert list(residual) == ["w"]
    assert scales[SCALES] == pytest.approx([2 / 127])


def made(initial: dict[str, np.ndarray], **kinds: Any) -> CompressionFilter:
    return CompressionFilter(Compression(**kinds), Start(initial, tuple(initial)))


def test_slots_have_streams_of_their_own_and_equal_models_are_coded_once() -> None:
    one, shared = made({"w": np.zeros(3, np.float32)}, down="int8"), {"w": f32(1, 0.3, 0.2)}
    tasks = [Task(5, 0, shared), Task(6, 1, shared), Task(7, 2, {"w": f32(9, 9, 1)}), Task(8, 3, {"w": f32(1, 2, 3)})]
    tasks[3] = Task(8, 3, tasks[3].arrays, stream="global")
    first, second, other, _ = one.down(ROUND, [payload_of(task) for task in tasks])
    assert first.arrays is second.arrays
    assert first.received is second.received
    assert set(one.state) == {"0", "2", "global"}
    assert other.nbytes == 3 + 4
    client = ClientHalf(Compression(down="int8"), {"w": np.zeros(3, np.float32)})
    assert client.received(first.arrays, first.scales)["w"].tobytes() == first.received["w"].tobytes()
    again = unpack(pack(one.state), made({}, down="int8").state)
    assert again["2"]["w"].tolist() == one.state["2"]["w"].tolist()


def test_the_error_of_one_exchange_is_added_in_the_next() -> None:
    """Scale 1: .25 rounds to 0 and waits, .5 goes to the even 0, .75 is 1."""
    one, model = made({"w": np.zeros(2, np.float32)}, down="int8"), {"w": f32(127, 0.25)}
    sent = [one.down(ROUND, [payload_of(Task(0, 0, model))])[0].arrays["w"].tolist() for _ in range(3)]
    assert sent == [[127, 0], [127, 0], [127, 1]]
    assert one.state["0"]["w"].tolist() == [0, -0.25]


def test_a_coded_reply_has_a_byte_a_value_and_its_scales() -> None:
    model = {"w": np.zeros(3, np.float32)}
    (payload,) = made(model, up="int8").down(ROUND, [payload_of(Task(0, 0, model))])
    assert payload.reply_nbytes == 3 + 4


def test_the_error_of_a_model_of_another_shape_is_not_added() -> None:
    model, base = {"w": f32(127, 0.25)}, {"w": f32(0, 0)}
    for residual in ({}, {"w": f32(9)}):
        assert compression.compressed(model, base, residual, "int8")[0]["w"].tolist() == [127, 0]


@pytest.mark.parametrize("kind", ["int8", "float16"])
def test_a_model_without_float32_is_sent_as_it_is(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    received, trained = {"w": np.zeros(3)}, {"w": np.arange(3.0)}
    assert ClientHalf(Compression(up=kind), received).upload(trained, received, {}) == (trained, {}, {})
    (payload,) = made(received, up=kind, down=kind).down(ROUND, [payload_of(Task(0, 0, received))])
    assert payload.arrays == received
    assert payload.model == {"w": ((3,), "float64")}
    assert "float64" in caplog.text


def test_a_residual_is_told_apart_from_the_state_of_the_objective() -> None:
    state = {"weight": f32(1), **compression.marked({"weight": f32(2)})}
    assert compression.apart(state) == ({"weight": f32(1)}, {"weight": f32(2)})


def test_clients_that_cannot_decode_are_not_asked() -> None:
    with pytest.raises(ValueError, match="nonce=True"):
        RoundSettings(compression=Compression(down="int8"))


@pytest.mark.parametrize("kind", ["int8", "float16"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1e30])
def test_what_is_not_finite_travels_and_is_rejected(kind: Any, value: float, recwarn: pytest.WarningsRecorder) -> None:
    """What is only too large for float16 is cut, and the rest stays in the residual."""
    received = {"w": np.zeros(1030, np.float32)}
    trained = {"w": np.where(np.arange(1030) == 3, np.float32(value), np.float32(1))}
    arrays, scales, residual = ClientHalf(Compression(up=kind), received).upload(trained, received, {})
    upload = Upload(0, 0, arrays, {}, 1, {}, scales=scales)
    one, payload = made(received, up=kind), payload_of(Task(0, 0, received))
    assert np.isfinite(residual["w"]).all()
    if np.isfinite(value):
        assert np.isfinite(one.up(payload, upload).arrays["w"]).all()
    else:
        with pytest.raises(UploadError, match="NaN or infinity"):
            one.up(payload, upload)
    assert not recwarn.list


# ---- malformed encodings ---------------------------------------------------------------------------------------


def judged(arrays: dict[str, np.ndarray], scales: dict[str, np.ndarray]) -> Upload:
    """Return what the guard and the filter make of an upload for a model of three values that was all zeros."""
    identify()
    received = {"w": np.zeros(3, np.float32)}
    one = made(received, up="int8")
    (payload,) = one.down(ROUND, [payload_of(Task(0, 0, received))])
    message, asked = records.request(payload, 1, {"run": "run", "round": 1, "exchange": 0}, 60)
    message.metadata.__dict__["_message_id"] = "m"
    reply = Message(records.answer(message.content, arrays, {}, 5, {}, scales), reply_to=message)
    return one.up(payload, Upload(0, 0, task=payload.task, **records.check(reply, asked)))


def q(*values: int) -> dict[str, np.ndarray]:
    return {"w": np.array(values, np.int8)}


def test_a_right_encoding_passes_and_is_counted_as_it_travelled() -> None:
    upload = judged(q(127, -127, 1), {SCALES: f32(0.5)})
    assert upload.arrays["w"].tolist() == [63.5, -63.5, 0.5]
    assert (upload.nbytes, upload.scales) == (3 + 4, {})


HUGE = np.zeros(compression.BLOCK * 100, np.int8)
MALFORMED = {
    "exact": ({"w": f32(1, 2, 3)}, {SCALES: f32(1)}, "wrong_dtype"),
    "too long": ({"w": HUGE}, {SCALES: f32(1)}, "wrong_shape"),
    "no scales": (q(1, 2, 3), {}, "malformed_message"),
    "more scales": (q(1, 2, 3), {SCALES: f32(1, 1)}, "wrong_shape"),
    "scales of float64": (q(1, 2, 3), {SCALES: np.ones(1)}, "wrong_dtype"),
    "other scales": (q(1, 2, 3), {"s": f32(1)}, "missing_array"),
    "NaN": (q(1, 2, 3), {SCALES: f32(np.nan)}, "non_finite"),
    "infinite": (q(1, 2, 3), {SCALES: f32(np.inf)}, "non_finite"),
    "negative": (q(1, 2, 3), {SCALES: f32(-1)}, "malformed_array"),
    "-128": (q(-128, 2, 3), {SCALES: f32(1)}, "malformed_array"),
    "overflow": (q(127, 2, 3), {SCALES: f32(3e38)}, "non_finite"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_encodings_are_rejected(name: str) -> None:
    arrays, scales, reason = MALFORMED[name]
    with pytest.raises(UploadError) as caught:
        judged(arrays, scales)
    assert caught.value.reason == reason


# ---- whole runs ------------------------------------------------------------------------------------------------


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "share"), [("int8", 0.27), ("float16", 0.5)])
def test_bytes_and_accuracy_of_a_run(tmp_path: Path, kind: str, share: float) -> None:
    both = (f"compression.down={kind}", f"compression.up={kind}")
    exact = run(tmp_path / "exact")
    coded = run(tmp_path / kind, *both)
    for before, after in zip(lines(tmp_path / "exact"), lines(tmp_path / kind), strict=True):
        assert after["bytes_down"] <= share * before["bytes_down"]
        assert after["bytes_up"] <= share * before["bytes_up"]
        assert after["dropped"] == 0
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=0.02)
    for name, array in exact.driver.global_model().items():
        assert coded.driver.global_model()[name] == pytest.approx(array, abs=0.01)


def first_request(folder: Path, *overrides: str) -> RecordDict:
    """Return what the server of a run sent first."""
    requests: list[RecordDict] = []

    def app(message: Message, context: Any) -> Message:
        requests.append(message.content)
        return client_app(message, context)

    run(folder, *overrides, app=app)
    return requests[0]


@pytest.mark.slow
def test_a_residual_stands_beside_the_state_of_the_objective(tmp_path: Path) -> None:
    asked = first_request(tmp_path, *INT8, "method=feddyn", "rounds=1").config_records["config"]
    store = StateStore(state_root(), str(asked["run"]), int(str(asked["client"])))
    own, residual = compression.apart(store.load(int(str(asked["visit"]))))
    assert own
    assert residual


@pytest.mark.slow
def test_a_residual_counts_only_when_its_upload_was_accepted(tmp_path: Path) -> None:
    overrides = [*SMALL, *INT8, "rounds=1", f"output={tmp_path}"]
    content = first_request(tmp_path, *INT8, "rounds=1")
    shop = run_cache(join(overrides))
    config = content.config_records["config"]

    def sent(state: int, visit: int) -> bytes:
        config["state"], config["visit"] = state, visit
        answer = carry_out(shop, "train", content)
        return b"".join(a.tobytes() for a in views(answer.array_records["arrays"]).values())

    fresh = sent(0, 7)  # an upload that is lost: the server does not name visit 7 the next time
    assert sent(0, 8) == fresh
    assert sent(8, 9) != fresh
