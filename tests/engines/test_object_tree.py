"""The judge on trees made by hand; a real SuperLink: tests/faults/test_bombs.py."""

import json

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedcross.core.allowance import HEAD, NO_ARRAYS, RECORDS, SCALARS, Allowance, Arrays
from fedcross.core.errors import UploadError
from fedcross.engines.grid import identify
from fedcross.engines.object_tree import Judge, most_objects, names_of, read
from fedcross.strategies.wire.records import encode
from tests.support import bombs
from tests.support.bombs import Objects

ONE = Allowance({"arrays": Arrays(2, 5000)}, frozenset({"config", "metrics"}))


class Store:
    """Contents by name, and what was asked for."""

    def __init__(self, contents):
        self.contents, self.asked = contents, []

    def __call__(self, names, most):
        for name in names:
            self.asked.append(name)
            yield name, self.contents[name]


def judged(objects, root, allowance=ONE, tree=None):
    """Return the store after the judge accepted the reply."""
    store = Store(objects.contents)
    tree = objects.trees[root] if tree is None else tree
    Judge(allowance, names_of(tree, allowance), store).judge(root)
    return store


def refusal(objects, root, allowance=ONE, tree=None):
    """Return why the reply is refused, and what had been asked for."""
    store = Store(objects.contents)
    tree = objects.trees[root] if tree is None else tree
    with pytest.raises(UploadError) as caught:
        Judge(allowance, names_of(tree, allowance), store).judge(root)
    return caught.value.reason, store.asked


@pytest.fixture
def objects():
    return Objects()


def reply(objects, arrays, scalars=None):
    """Add a reply with this record of arrays."""
    records = {"config": objects.scalars(ConfigRecord({"nonce": "x"}))} if scalars is None else scalars
    return objects.message(objects.table({**records, **({"arrays": arrays} if arrays else {})}), Metadata())


def test_what_flower_sends_for_a_true_reply_passes_and_each_object_is_asked_for_once():
    identify()
    arrays = {"a": np.zeros(100, np.float32), "b": np.zeros(100, np.float32)}  # equal: one object of two names
    content = RecordDict(
        {"arrays": encode(arrays), "config": ConfigRecord({"n": 1}), "metrics": MetricRecord({"m": 1})}
    )
    message = Message(content, dst_node_id=2, message_type="train")
    contents = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    store = Store(contents)
    Judge(ONE, names_of(get_object_tree(message), ONE), store).judge(message.object_id)
    assert sorted(store.asked) == sorted(contents)


def test_equal_chunks_count_as_often_as_they_are_used(objects):
    arrays = objects.record({"a": objects.array([bytes(2500)], [0] * 2)})
    judged(objects, reply(objects, arrays))
    more = objects.record({"a": objects.array([bytes(2501)], [0] * 2)})
    assert refusal(objects, reply(objects, more))[0] == "too_large"


def test_two_arrays_of_one_record_share_its_bytes(objects):
    def of(size):
        pair = {name: objects.array([name.encode() * size], [0]) for name in "ab"}
        return reply(objects, objects.record(pair))

    judged(objects, of(2500))
    assert refusal(objects, of(2501))[0] == "too_large"


def test_nothing_more_is_asked_for_than_led_to_the_refusal(objects):
    chunk = objects.add("ArrayChunk", [], bytes(5001))
    told = {"dtype": "f", "shape": [1], "stype": "s", "arraychunk_ids": [0] * 10**4}
    root = reply(objects, objects.record({"a": objects.add("Array", [chunk], json.dumps(told).encode())}))
    reason, asked = refusal(objects, root)
    assert reason == "too_large"
    assert chunk not in asked
    stranger = objects.message(objects.table({"arrays": objects.record({}), "more": objects.record({})}), Metadata())
    reason, asked = refusal(objects, stranger)
    assert (reason, len(asked)) == ("malformed_message", 2)


def test_chunks_are_asked_for_only_as_long_as_they_may_still_be_of_the_reply(objects):
    arrays = {"a": objects.array([b"1" * 2000, b"2" * 2000], [0, 1]), "b": objects.array([b"3" * 4000], [0])}
    allowance = Allowance({"arrays": Arrays(3, 3000)}, ONE.scalars)
    reason, asked = refusal(objects, reply(objects, objects.record(arrays)), allowance)
    chunks = [name for name in asked if objects.contents[name].startswith(b"ArrayChunk")]
    assert reason == "too_large"
    assert 1 <= len(chunks) < 3


def test_a_record_has_no_more_arrays_than_were_asked_for(objects):
    empty = objects.array([], [])  # one object under any number of names
    judged(objects, reply(objects, objects.record(dict.fromkeys("ab", empty))))
    assert refusal(objects, reply(objects, objects.record(dict.fromkeys("abc", empty))))[0] == "too_large"


@pytest.mark.parametrize("make", [kind for kind, why in bombs.KINDS.items() if why and kind is not bombs.forged])
def test_what_a_hostile_device_sends_is_refused_for_the_same_reason_as_over_a_network(objects, make):
    identify()
    message = Message(RecordDict({"config": ConfigRecord(ORIGIN)}), dst_node_id=2, message_type="train")
    root = make(objects, message, Metadata())
    assert refusal(objects, root)[0] == bombs.KINDS[make]


ORIGIN = {"run": "r", "round": 1, "exchange": 0, "client": 0, "slot": 0, "nonce": "n"}


def test_one_object_is_not_larger_than_its_kind_may_be(objects):
    for kind, most in (("MetricRecord", SCALARS), ("ConfigRecord", SCALARS)):
        root = reply(objects, None, {"metrics": objects.add(kind, [], bytes(most))})
        assert refusal(objects, root)[0] == "too_large"
    assert refusal(objects, objects.add("Message", [], bytes(HEAD)))[0] == "too_large"


def test_a_tree_is_refused_before_anything_is_pulled(objects):
    def refused(tree, allowance=ONE):
        with pytest.raises(UploadError) as caught:
            names_of(tree, allowance)
        return caught.value.reason

    assert refused(ObjectTree(object_id="A" * 64)) == "malformed_message"
    assert refused(ObjectTree(object_id="../../etc/passwd")) == "malformed_message"
    deep = ObjectTree(object_id="a" * 64)
    for _ in range(5):
        deep = ObjectTree(object_id="a" * 64, children=[deep])  # a name within itself: no cycle is followed
    assert refused(deep) == "malformed_message"
    wide = ObjectTree(object_id="a" * 64, children=[ObjectTree(object_id="b" * 64)] * most_objects(ONE))
    assert refused(wide) == "too_large"
    assert names_of(ObjectTree(object_id="a" * 64, children=wide.children[1:]), ONE) == {"a" * 64, "b" * 64}


def test_an_object_that_its_tree_does_not_name_is_never_asked_for(objects):
    root = reply(objects, objects.record({"a": objects.array([b"1"], [0])}))
    assert refusal(objects, root, tree=ObjectTree(object_id=root)) == ("malformed_message", [root])


def test_an_object_has_the_digest_that_names_it(objects):
    name = objects.add("ArrayChunk", [], b"1234")
    assert read(name, objects.contents[name]).body == b"1234"
    for forged in (objects.contents[name] + b"5", b"", objects.contents[name][:-1]):
        with pytest.raises(UploadError, match="digest"):
            read(name, forged)


@pytest.mark.parametrize(
    ("kind", "children", "length"),
    [
        ("ArrayChunk", [], 3),
        ("ArrayChunk", [], 5),
        ("Array Chunk", [], 4),
        ("Array", ["a" * 64] * 2, 4),
        ("A", ["b"], 4),
    ],
)
def test_head_and_body_of_an_object_agree(objects, kind, children, length):
    content = f"{kind} {','.join(children)} {length}".encode() + b"\0" + b"1234"
    import hashlib

    with pytest.raises(UploadError) as caught:
        read(hashlib.sha256(content).hexdigest(), content)
    assert caught.value.reason == "malformed_message"


def bad_arrays(objects):
    """Yield records of arrays in each of which one thing is wrong."""
    chunk = objects.add("ArrayChunk", [], b"1")
    good = {"dtype": "f", "shape": [1], "stype": "s", "arraychunk_ids": [0]}
    for change in (
        {"dtype": 1},
        {"shape": "1"},
        {"shape": [True]},
        {"shape": [1.5]},
        {"stype": None},
        {"arraychunk_ids": [1]},
        {"arraychunk_ids": [-1]},
        {"arraychunk_ids": []},
        {"arraychunk_ids": {"0": 0}},
        {"more": 1},
    ):
        yield objects.record({"a": objects.add("Array", [chunk], json.dumps({**good, **change}).encode())})
    yield objects.record({"a": chunk})
    yield objects.record({"a": objects.add("Array", [objects.record({})], json.dumps(good).encode())})
    yield objects.add("ArrayRecord", [], json.dumps({"a": chunk}).encode())
    yield objects.add("ArrayRecord", [objects.array([b"1"], [0])], b"{}")
    yield objects.add("ArrayRecord", [], b"[" * 10**5)
    yield objects.add("ArrayRecord", [], b"[]")
    yield objects.table({})


def test_each_wrong_array_is_refused(objects):
    reasons = [refusal(objects, reply(objects, record))[0] for record in bad_arrays(objects)]
    assert reasons == ["malformed_message"] * 17


def test_a_reply_whose_records_nobody_told_has_a_few_of_scalars_only(objects):
    def of(count):
        records = {str(i): objects.scalars(MetricRecord({"m": i})) for i in range(count)}
        return objects.message(objects.table(records), Metadata())

    judged(objects, of(RECORDS), NO_ARRAYS)
    assert refusal(objects, of(RECORDS + 1), NO_ARRAYS)[0] in {"malformed_message", "too_large"}
    arrays = reply(objects, objects.record({}), {})
    assert refusal(objects, arrays, NO_ARRAYS)[0] == "malformed_message"


def test_one_object_cannot_be_scalars_and_arrays_at_once(objects):
    record = objects.record({})
    root = objects.message(objects.table({"arrays": record, "metrics": record}), Metadata())
    assert refusal(objects, root)[0] == "malformed_message"


def test_an_error_has_nothing_below_it(objects):
    root = objects.message(None, Metadata())
    assert judged(objects, root).asked == [root]
