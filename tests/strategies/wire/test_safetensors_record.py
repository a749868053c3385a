"""A packed record: safetensors' own bytes, exact, aligned, uncopied, and nothing foreign is parsed or believed."""

import contextlib

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from fedcross.core.errors import UploadError
from fedcross.strategies.round.settings import RoundSettings
from fedcross.strategies.wire import safetensors_record as packing
from fedcross.strategies.wire.records import decode, encode, is_packed, spec_of, views
from fedcross.strategies.wire.safetensors_record import PACKED, STYPE, declared, pack, packable, unpack

MODEL = {
    "conv.weight": np.arange(6, dtype=np.float32).reshape(2, 3) - 2.5,
    "norm.count": np.array(7, dtype=np.int64),
    "mask": np.array([True, False, True]),
    "a.half": np.array([1.5], np.float16),
    "empty": np.zeros((0, 4), np.float32),
}


def same(found, expected):
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    return True


def test_safetensors_reads_it_and_writes_the_same_bytes():
    data = pack(MODEL)
    assert same({name: load(data)[name] for name in MODEL}, MODEL)
    assert data == save(MODEL)


def test_it_comes_back_in_the_order_of_the_spec_whatever_the_order_it_was_packed_in():
    data = pack(dict(reversed(MODEL.items())))
    assert same(unpack(data, spec_of(MODEL)), MODEL)
    assert declared(data) == spec_of(MODEL)


def test_views_are_aligned_and_cannot_be_written():
    for view in unpack(pack(MODEL), spec_of(MODEL)).values():
        assert view.flags.aligned
        assert not view.flags.writeable
        assert not view.flags.owndata


names = st.text(min_size=1, max_size=8)
arrays = st.builds(
    lambda shape, dtype, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.sampled_from(sorted(packing._DTYPES)),
    st.integers(0, 9),
)


@pytest.mark.slow
@given(st.dictionaries(names, arrays, max_size=5))
def test_any_model_survives(model):
    assert same(unpack(pack(model), spec_of(model)), model)
    assert declared(pack(model)) == spec_of(model)


@given(st.binary(max_size=64))
def test_bytes_of_somebody_else_are_an_upload_error(data):
    with pytest.raises(UploadError):
        unpack(data, spec_of(MODEL))
    with contextlib.suppress(UploadError):
        assert declared(data) == {}  # nothing but eight bytes and "{}" is readable


def changed_header():
    return pack({**MODEL, "mask": np.array([1, 0, 1], np.uint8)})


@pytest.mark.parametrize(
    "data",
    [pack(MODEL)[:-1], pack(MODEL) + b"x", b"", changed_header(), bytearray(pack(MODEL))],
    ids=["short", "long", "nothing", "another dtype", "no bytes"],
)
def test_what_was_not_declared_is_refused(data):
    with pytest.raises(UploadError) as caught:
        unpack(data, spec_of(MODEL))
    assert caught.value.reason == "malformed_array"


def test_a_record_is_one_array_and_both_ends_read_it():
    record = encode(MODEL, packed=True)
    assert list(record) == [PACKED]
    assert is_packed(record)
    assert not is_packed(encode(MODEL))
    assert same(decode(record, spec_of(MODEL)), MODEL)
    assert same(dict(sorted(views(record).items())), dict(sorted(MODEL.items())))


def test_nan_in_a_packed_record_is_refused():
    model = {"w": np.array([1.0, np.nan], np.float32)}
    with pytest.raises(UploadError) as caught:
        decode(encode(model, packed=True), spec_of(model))
    assert caught.value.reason == "non_finite"
    assert np.isnan(decode(encode(model, packed=True), spec_of(model), finite=False)["w"][1])


def test_a_model_with_an_array_of_that_name_is_not_mistaken():
    model = {PACKED: np.zeros(3, np.float32)}
    assert not is_packed(encode(model))
    assert same(decode(encode(model), spec_of(model)), model)
    assert same(decode(encode(model, packed=True), spec_of(model)), model)


def test_what_the_format_does_not_know_travels_as_it_did():
    model = {"c": np.zeros(2, np.complex64)}
    assert not packable(spec_of(model))
    assert list(encode(model, packed=True)) == ["c"]
    forged = ArrayRecord({PACKED: Array(dtype="uint8", shape=(3,), stype=STYPE, data=b"abc")})
    with pytest.raises(UploadError) as caught:
        decode(forged, spec_of(model))
    assert caught.value.reason == "missing_array"


def test_foreign_clients_get_plain_arrays():
    assert RoundSettings().packs is False
    assert RoundSettings(networked=True).packs is False  # any Flower client may answer
    assert RoundSettings(networked=True, nonce=True).packs is True
    with pytest.raises(ValueError, match="packed messages need fedcross clients"):
        RoundSettings(packed=True)


def test_the_safetensors_library_reads_it_and_its_values_are_aligned():
    """Three arrays of 8, 4 and 1 bytes a value: the header is padded to a multiple of 8."""
    model = {"b": np.arange(3, dtype=np.int8), "w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array([7, 8])}
    for count in (1, 2, 3):
        arrays = dict(list(model.items())[-count:])
        data = pack(arrays)
        assert int.from_bytes(data[:8], "little") % 8 == 0
        found = load(data)
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
