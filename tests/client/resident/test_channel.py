from __future__ import annotations

import fcntl
import os
import socket
import threading

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fedcross.client.resident import channel
from fedcross.core.errors import ProtocolError
from fedcross.strategies.wire.records import encode, views

ARRAYS = npst.arrays(
    st.sampled_from([np.float32, np.float16, np.int8, np.int64, np.bool_]), npst.array_shapes(min_dims=0, min_side=0)
)
SCALARS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.floats(), st.booleans(), st.text(max_size=20))


def through(head: dict[str, object], content: RecordDict | None) -> tuple[dict[str, object], RecordDict | None]:
    here, there = socket.socketpair()
    with here, there:
        thread = threading.Thread(target=channel.send, args=(here, head, content))
        thread.start()
        try:
            return channel.receive(there)
        finally:
            thread.join()


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.dictionaries(st.text(max_size=8), ARRAYS, max_size=4), st.dictionaries(st.text(max_size=8), SCALARS))
def test_records_arrive_to_the_bit(arrays: dict[str, np.ndarray], scalars: dict[str, object]) -> None:
    sent = RecordDict(
        {"arrays": encode(arrays), "config": ConfigRecord(scalars), "m": MetricRecord({"a": 1, "b": 2.0})}
    )
    head, got = through({"task": "train"}, sent)
    assert head == {"task": "train"}
    assert got is not None
    assert list(got) == ["arrays", "config", "m"]
    found = views(got.array_records["arrays"])
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    assert list(got.config_records["config"]) == list(scalars)
    for name, value in scalars.items():
        other = got.config_records["config"][name]
        assert type(other) is type(value)
        assert other == value or (other != other and value != value)  # or both NaN
    assert [type(v) for v in got.metric_records["m"].values()] == [int, float]


def test_a_frame_without_content() -> None:
    assert through({"pid": 3}, None) == ({"pid": 3}, None)


def test_an_end_before_a_frame_and_in_one() -> None:
    here, there = socket.socketpair()
    with there:
        here.close()
        with pytest.raises(EOFError):
            channel.receive(there)
    here, there = socket.socketpair()
    with there:
        here.sendall(channel._PREFIX.pack(100, 0) + b"{")
        here.close()
        with pytest.raises(EOFError, match="middle"):
            channel.receive(there)


@pytest.mark.parametrize(
    "data",
    [
        channel._PREFIX.pack(channel.MAX_HEAD + 1, 0),
        channel._PREFIX.pack(2, 1) + b"{}",
        channel._PREFIX.pack(2, 0) + b"{}",
        channel._PREFIX.pack(3, 0) + b"nul",
    ],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(data)
        with pytest.raises(ProtocolError):
            channel.receive(there)


def test_memory_that_can_still_change_is_refused() -> None:
    memory = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.write(memory, b"1234")
    records = [["arrays", "arrays", [["w", "float32", [1], "numpy.ndarray", 4]]]]
    try:
        with pytest.raises(ProtocolError, match="not sealed"):
            channel._content(records, memory)
        fcntl.fcntl(memory, fcntl.F_ADD_SEALS, channel._SEALS)
        assert channel._content(records, memory).array_records["arrays"]["w"].data == b"1234"
        records[0][2][0][4] = 5  # type: ignore[index]
        with pytest.raises(ProtocolError, match="outside"):
            channel._content(records, memory)
    finally:
        os.close(memory)


def test_pieces_longer_than_one_call_can_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_CHUNK", 3)
    _, got = through({}, RecordDict({"arrays": encode({"w": np.arange(7, dtype=np.int8)})}))
    assert got is not None
    assert views(got.array_records["arrays"])["w"].tolist() == list(range(7))


def test_bytes_outside_arrays_are_refused() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(ProtocolError, match="cannot be sent"):
        channel.send(here, {}, RecordDict({"config": ConfigRecord({"b": b"x"}), "a": ArrayRecord()}))
