"""Records of arrays: exact, uncopied, and nothing foreign is believed, packed or not."""

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from safetensors.numpy import load, save

from fedcross.core.errors import UploadError
from fedcross.strategies.method import Task
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.wire.records import PACKED, STYPE, decode, encode, is_packed, packable, spec_of, views
from tests.support.replies import payload_of

MODEL = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(7, dtype=np.int64)}
MIXED = {
    "conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5,
    "norm.count": np.array(7, dtype=np.int64),
    "mask": np.array([True, False, True]),
    "a.half": np.array([1.5], np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


def same(found, expected):
    assert {name: (a.shape, a.dtype) for name, a in found.items()} == {
        name: (a.shape, a.dtype) for name, a in expected.items()
    }
    return all((found[name] == array).all() for name, array in expected.items())


def reason(record, spec=None):
    with pytest.raises(UploadError) as caught:
        decode(record, spec or spec_of(MODEL))
    return caught.value.reason


def raw(data, shape=(2, 3), dtype="float32", stype="numpy.ndarray"):
    return ArrayRecord({"w": Array(dtype, shape, stype, data), "n": encode(MODEL)["n"]})


def packed(data, dtype="uint8", shape=None):
    return ArrayRecord({PACKED: Array(dtype, shape or (len(data),), STYPE, data)})


@pytest.mark.parametrize("packs", [False, True])
def test_a_round_trip_is_exact_and_copies_nothing(packs):
    record = encode(MIXED, packs)
    back = decode(record, spec_of(MIXED))
    assert list(back) == list(MIXED)
    assert same(back, MIXED)
    assert same(views(record), MIXED)
    assert is_packed(record) is packs
    assert is_packed(encode(MODEL, is_packed(record))) is packs  # like that record
    for view in back.values():
        assert view.flags.aligned or not packs
        assert not view.flags.writeable
        assert not view.flags.owndata


def test_plain_flower_reads_and_writes_it():
    assert same({name: array.numpy() for name, array in encode(MODEL).items()}, MODEL)
    assert same(decode(ArrayRecord({name: Array(array) for name, array in MODEL.items()}), spec_of(MODEL)), MODEL)


def test_a_record_owns_its_bytes():
    model = {"w": np.zeros(3, np.float32)}
    record = encode(model)
    model["w"][:] = 1
    assert (record["w"].numpy() == 0).all()


def test_safetensors_reads_a_packed_record_and_writes_the_same_bytes():
    data = encode(dict(reversed(MIXED.items())), packed=True)[PACKED].data
    assert data == save(MIXED)
    assert same(load(data), MIXED)
    assert int.from_bytes(data[:8], "little") % 8 == 0


models = st.dictionaries(
    st.text(min_size=1, max_size=8),
    arrays_of.arrays(
        st.sampled_from(["float64", "float32", "float16", "int64", "int8", "uint8", "bool"]),
        arrays_of.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
        elements=st.sampled_from([0, 1]),
    ),
    max_size=5,
)


@pytest.mark.slow
@given(models, st.booleans())
@settings(max_examples=40)
def test_any_model_survives(model, packs):
    assert same(decode(encode(model, packs), spec_of(model)), model)


def test_bytes_are_those_of_the_values():
    assert payload_of(Task(0, 0, MODEL, {"again": MODEL})).nbytes == 2 * (6 * 4 + 8)


def test_every_kind_of_fault_has_its_reason():
    def changed(**entries):
        return encode({**MODEL, **entries})

    assert reason(encode({"w": MODEL["w"]})) == "missing_array"
    assert reason(changed(other=np.zeros(1, np.float32))) == "extra_array"
    assert reason(changed(w=np.zeros((3, 2), np.float32))) == "wrong_shape"
    assert reason(changed(w=np.zeros((2, 3), np.complex128))) == "wrong_dtype"
    for bad in (np.nan, np.inf):
        model = {**MODEL, "w": np.full((2, 3), bad, np.float32)}
        for record in (encode(model), encode(model, packed=True)):
            assert reason(record) == "non_finite"
            assert not np.isfinite(views(record)["w"]).any()  # only uploads must be finite
    assert reason(raw(encode(MODEL)["w"].data, stype="pickle")) == "malformed_array"


def test_a_declared_shape_that_the_bytes_do_not_have_is_rejected():
    assert reason(raw(encode({"w": np.zeros((1, 1), np.float32)})["w"].data)) == "malformed_array"
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999999,), }".ljust(117)
    assert reason(raw(b"\x93NUMPY\x01\x00v\x00" + head + b"\n")) == "malformed_array"  # allocates nothing


@given(st.binary(max_size=300))
def test_no_bytes_get_through_or_crash(data):
    assert reason(raw(data)) == "malformed_array"
    assert reason(packed(data)) == "malformed_array"


@given(st.integers(0, 127), st.integers(0, 255))
def test_a_damaged_header_never_gives_wrong_values(position, value):
    good = bytearray(encode(MODEL)["w"].data)
    good[position] = value
    try:
        back = decode(raw(bytes(good)), spec_of(MODEL))["w"]
    except UploadError:
        return
    assert (back == MODEL["w"]).all()


def written(array, version=(1, 0), shape=None, fortran=False):
    """Return a .npy file whose header has other spaces than numpy's, of this version of the format."""
    head = f"{{'descr': '{array.dtype.str}',  'fortran_order': {fortran},  'shape': {shape or array.shape}}}\n".encode()
    length = len(head).to_bytes(2 if version == (1, 0) else 4, "little")
    return b"\x93NUMPY" + bytes(version) + length + head + array.tobytes()


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_a_header_in_another_style_is_read(version):
    assert (decode(raw(written(MODEL["w"], version)), spec_of(MODEL))["w"] == MODEL["w"]).all()


@pytest.mark.parametrize(
    "data",
    [
        written(MODEL["w"], (3, 0)),
        b"\x93NUMPZ" + encode(MODEL)["w"].data[6:],
        written(MODEL["w"], shape=(3, 2)),
        written(MODEL["w"].view(np.int32)),
        written(MODEL["w"], fortran=True)[:-4],
        written(MODEL["w"], shape="(2, 3" + " " * 1024 + ")"),
    ],
    ids=["version", "magic", "other shape", "other dtype", "short", "long header"],
)
def test_another_header_is_refused(data):
    assert reason(raw(data)) == "malformed_array"


@pytest.mark.parametrize("shape", [(2, 3), (4, 2, 3)])
def test_values_that_lie_column_by_column_are_read_as_numpy_reads_them(shape):
    """As the coefficients of scikit-learn's LogisticRegression are sent by Flower's own template."""
    array = np.asfortranarray(np.arange(np.prod(shape), dtype=np.float64).reshape(shape))
    found = decode(ArrayRecord({"0": Array.from_numpy_ndarray(array)}), {"0": (shape, "float64")})["0"]
    assert (found == array).all()
    assert found.flags.c_contiguous
    assert not found.flags.writeable


@pytest.mark.parametrize("packs", [False, True])
def test_bytes_that_are_no_boolean_are_refused(packs):
    model = {"b": np.array([True, False, True])}
    ((name, array),) = encode(model, packs).items()
    bad = ArrayRecord({name: Array(array.dtype, array.shape, array.stype, array.data[:-1] + b"\x02")})
    assert reason(bad, spec_of(model)) == "malformed_array"


def test_a_packed_record_must_be_what_it_declares():
    data = encode(MODEL, packed=True)[PACKED].data
    assert reason(packed(data, "int8")) == "wrong_dtype"
    assert reason(packed(data, shape=(len(data) + 1,))) == "wrong_shape"
    other = encode({**MODEL, "n": np.array(7.0)}, packed=True)[PACKED].data
    for wrong in (data[:-1], data + b"x", b"", other):
        assert reason(packed(wrong)) == "malformed_array"
    with pytest.raises(UploadError):
        views(packed(data[:-1]))


def test_an_array_of_that_name_and_what_the_format_does_not_know_travel_as_they_are():
    model = {PACKED: np.zeros(3, np.float32)}
    assert same(decode(encode(model), spec_of(model)), model)
    odd = {"c": np.zeros(2, np.complex64)}
    assert not packable(spec_of(odd))
    assert list(encode(odd, packed=True)) == ["c"]
    assert reason(packed(b"abc"), spec_of(odd)) == "missing_array"


def test_foreign_clients_get_plain_arrays():
    assert RoundSettings().packs is False
    assert RoundSettings(networked=True).packs is False  # any Flower client may answer
    assert RoundSettings(networked=True, nonce=True).packs is True
    with pytest.raises(ValueError, match="packed"):
        RoundSettings(packed=True)
