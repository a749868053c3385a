import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.protocol import Payload
from fedcross.strategies.wire.records import decode, encode, encode_like, is_packed, spec_of

MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, dtype=np.int64)}


def test_round_trip_is_exact_and_readable_by_plain_flower():
    record = encode(MODEL)
    for name, array in MODEL.items():
        assert (record[name].numpy() == array).all()
        assert record[name].numpy().dtype == array.dtype
    back = decode(record, spec_of(MODEL))
    assert all((back[name] == array).all() and back[name].dtype == array.dtype for name, array in MODEL.items())


def test_a_record_owns_its_bytes():
    model = {"w": np.zeros(3, np.float32)}
    record = encode(model)
    model["w"][:] = 1
    assert (record["w"].numpy() == 0).all()


def test_decoding_copies_nothing_and_cannot_be_written():
    record = encode(MODEL)
    view = decode(record, spec_of(MODEL))["w"]
    assert not view.flags.owndata
    assert not view.flags.writeable


def test_what_plain_flower_wrote_is_read():
    record = ArrayRecord({name: Array(array) for name, array in MODEL.items()})
    assert (decode(record, spec_of(MODEL))["w"] == MODEL["w"]).all()


@given(arrays_of.arrays(np.float32, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_any_finite_array_survives(array):
    model = {"a": np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=-1.0)}
    back = decode(encode(model), spec_of(model))["a"]
    assert back.shape == array.shape
    assert (back == model["a"]).all()


def test_bytes_are_those_of_the_values():
    assert Payload(0, 0, MODEL, {"again": MODEL}).nbytes == 2 * (6 * 4 + 8)


def test_a_record_is_packed_like_another():
    for packed in (False, True):
        other = encode(MODEL, packed)
        assert is_packed(encode_like(other, MODEL)) is packed


def reason(record, spec=None):
    with pytest.raises(UploadError) as caught:
        decode(record, spec or spec_of(MODEL))
    return caught.value.reason


def changed(**entries):
    return encode({**MODEL, **entries})


def test_every_kind_of_fault_has_its_reason():
    assert reason(encode({"w": MODEL["w"]})) == "missing_array"
    assert reason(changed(other=np.zeros(1, np.float32))) == "extra_array"
    assert reason(changed(w=np.zeros((3, 2), np.float32))) == "wrong_shape"
    assert reason(changed(w=np.zeros((2, 3), np.float64))) == "wrong_dtype"
    assert reason(changed(w=np.zeros((2, 3), np.complex128))) == "wrong_dtype"
    assert reason(changed(w=np.full((2, 3), np.nan, np.float32))) == "non_finite"
    assert reason(changed(w=np.full((2, 3), np.inf, np.float32))) == "non_finite"


def raw(data, shape=(2, 3), dtype="float32", stype="numpy.ndarray"):
    return ArrayRecord({"w": Array(dtype, shape, stype, data), "n": encode(MODEL)["n"]})


def test_a_declared_shape_that_the_bytes_do_not_have_is_rejected():
    small = encode({"w": np.zeros((1, 1), np.float32)})["w"].data
    assert reason(raw(small)) == "malformed_array"


def test_a_header_that_asks_for_a_huge_array_allocates_nothing():
    huge = (
        b"\x93NUMPY\x01\x00v\x00"
        + b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }".ljust(117)
        + b"\n"
    )
    assert reason(raw(huge)) == "malformed_array"


@given(st.binary(max_size=300))
def test_no_bytes_get_through_or_crash(data):
    assert reason(raw(data)) == "malformed_array"


@given(st.integers(0, 127), st.integers(0, 255))
def test_a_damaged_header_never_gives_wrong_values(position, value):
    good = bytearray(encode(MODEL)["w"].data)
    good[position] = value
    try:
        back = decode(raw(bytes(good)), spec_of(MODEL))["w"]
    except UploadError:
        return
    assert (back == MODEL["w"]).all()


def test_a_foreign_serialisation_is_rejected():
    assert reason(raw(encode(MODEL)["w"].data, stype="pickle")) == "malformed_array"


def test_fortran_order_is_rejected_not_misread():
    import io

    buffer = io.BytesIO()
    np.save(buffer, np.asfortranarray(MODEL["w"]))
    assert reason(raw(buffer.getvalue())) == "malformed_array"
