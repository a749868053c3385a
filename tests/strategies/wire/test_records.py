import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Task
from fedcross.strategies.wire.protocol import Payload
from fedcross.strategies.wire.records import decode, encode, encode_like, is_packed, spec_of, views
from fedcross.strategies.wire.safetensors_record import PACKED, STYPE

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


@pytest.mark.slow
@given(arrays_of.arrays(np.float32, arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_any_finite_array_survives(array):
    model = {"a": np.nan_to_num(array, nan=0.0, posinf=1.0, neginf=-1.0)}
    back = decode(encode(model), spec_of(model))["a"]
    assert back.shape == array.shape
    assert (back == model["a"]).all()


def test_bytes_are_those_of_the_values():
    assert Payload.of(Task(0, 0, MODEL, {"again": MODEL})).nbytes == 2 * (6 * 4 + 8)


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


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3)])
def test_values_that_lie_column_by_column_are_read_as_numpy_reads_them(shape):
    """As the coefficients of scikit-learn's LogisticRegression are sent by Flower's own template."""
    from flwr.app import Array as FlowerArray

    array = np.asfortranarray(np.arange(np.prod(shape), dtype=np.float64).reshape(shape))
    sent = FlowerArray.from_numpy_ndarray(array)
    assert b"'fortran_order': True" in sent.data
    found = decode(ArrayRecord({"0": sent}), {"0": (shape, "float64")})["0"]
    assert (found == array).all()
    assert found.flags.c_contiguous
    assert not found.flags.writeable


def test_columns_are_checked_as_rows_are():
    bad = np.asfortranarray(np.array([[1, np.nan, 3], [4, 5, 6]], np.float32))
    assert reason(ArrayRecord([bad]), {"0": ((2, 3), "float32")}) == "non_finite"
    short = written(MODEL["w"], fortran=True)[:-4]
    assert reason(raw(short)) == "malformed_array"


def written(array, version=(1, 0), shape=None, fortran=False):
    """Return a .npy file whose header has other spaces than numpy's, of this version of the format."""
    head = f"{{'descr': '{array.dtype.str}',  'fortran_order': {fortran},  'shape': {shape or array.shape}}}\n".encode()
    length = len(head).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + head + array.tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_header_in_another_style_is_read(version):
    data = written(MODEL["w"], version)
    assert not data.startswith(encode(MODEL)["w"].data[:40])
    assert (decode(raw(data), spec_of(MODEL))["w"] == MODEL["w"]).all()


@pytest.mark.parametrize(("length", "fits"), [(1024, True), (1025, False)])
def test_no_more_than_the_first_kibibyte_is_read_as_a_header(length, fits):
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)}".ljust(length - 11) + b"\n"
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + MODEL["w"].tobytes()
    assert len(data) - MODEL["w"].nbytes == length
    if fits:
        assert (decode(raw(data), spec_of(MODEL))["w"] == MODEL["w"]).all()
    else:
        assert reason(raw(data)) == "malformed_array"


@pytest.mark.parametrize("version", [(0, 0), (3, 0), (255, 255)])
def test_a_version_that_nobody_writes_is_refused(version):
    array = Array("float32", (2, 3), "numpy.ndarray", written(MODEL["w"], version))
    assert reason(ArrayRecord({"w": array}), {"w": ((2, 3), "float32")}) == "malformed_array"


@pytest.mark.parametrize("magic", [b"\x93NUMPZ", b"\x92NUMPY", b"PK\x03\x04\0\0"])
@pytest.mark.parametrize("own_style", [True, False])
def test_another_magic_string_is_refused(magic, own_style):
    data = encode(MODEL)["w"].data if own_style else written(MODEL["w"])
    array = Array("float32", (2, 3), "numpy.ndarray", magic + data[6:])
    assert reason(ArrayRecord({"w": array}), {"w": ((2, 3), "float32")}) == "malformed_array"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("byte", [2, 128, 255])
def test_bytes_that_are_no_boolean_are_refused(packed, byte):
    model = {"b": np.array([True, False, True])}
    record, spec = encode(model, packed), spec_of(model)
    assert (decode(record, spec)["b"] == model["b"]).all()
    ((name, array),) = record.items()
    bad = Array(array.dtype, array.shape, array.stype, array.data[:-1] + bytes([byte]))
    for finite in (True, False):
        with pytest.raises(UploadError, match="malformed_array: b holds bytes that are no boolean"):
            decode(ArrayRecord({name: bad}), spec, finite=finite)


def test_a_header_in_another_style_must_say_what_was_declared():
    assert reason(raw(written(MODEL["w"], shape=(3, 2)))) == "malformed_array"
    assert reason(raw(written(MODEL["w"].view(np.int32)))) == "malformed_array"
    assert reason(raw(written(MODEL["w"], shape=(3, 2), fortran=True))) == "malformed_array"


def test_one_dimension_has_no_order():
    line = np.arange(3, dtype=np.float32)
    record = ArrayRecord({"w": Array("float32", (3,), "numpy.ndarray", written(line, fortran=True))})
    assert decode(record, {"w": ((3,), "float32")})["w"].tolist() == [0, 1, 2]


def test_the_array_that_is_too_many_is_named():
    with pytest.raises(UploadError, match="'other' is not part of the model"):
        decode(changed(other=np.zeros(1, np.float32)), spec_of(MODEL))


@pytest.mark.parametrize("packed", [False, True])
def test_what_the_own_server_sends_is_read_as_it_is_declared(packed):
    """NaN too: only uploads must be finite."""
    model = {**MODEL, "w": np.full((2, 3), np.nan, np.float32)}
    record = encode(model, packed)
    assert len(record) == (1 if packed else 2)
    seen = views(record)
    assert list(seen) == ["w", "n"] or packed
    assert {name: (a.shape, str(a.dtype)) for name, a in seen.items()} == dict(spec_of(model))
    assert np.isnan(seen["w"]).all()
    assert seen["n"] == 7
    assert reason(record) == "non_finite"
    assert np.isnan(decode(record, spec_of(model), finite=False)["w"]).all()


def test_a_packed_record_must_be_what_it_declares():
    data = encode(MODEL, packed=True)[PACKED].data
    for dtype, shape, why in (("int8", (len(data),), "wrong_dtype"), ("uint8", (len(data) + 1,), "wrong_shape")):
        assert reason(ArrayRecord({PACKED: Array(dtype, shape, STYPE, data)})) == why
    assert decode(encode(MODEL, packed=True), spec_of(MODEL))["n"] == 7


def test_an_array_that_happens_to_have_the_packed_ones_name_is_an_array():
    model = {PACKED: np.arange(3, dtype=np.float32)}
    assert decode(encode(model), spec_of(model))[PACKED].tolist() == [0, 1, 2]
    assert views(encode(model))[PACKED].tolist() == [0, 1, 2]
