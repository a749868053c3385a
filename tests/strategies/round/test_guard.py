import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict

from fedcross.core.errors import UploadError
from fedcross.engines.grid import LocalGrid
from fedcross.strategies.round.guard import LARGEST_METRIC, MAX_EXAMPLES, MAX_METRICS, SHOWN, Inbox, check, shown
from fedcross.strategies.wire import protocol
from fedcross.strategies.wire.protocol import Payload, Round
from fedcross.strategies.wire.records import encode, spec_of

MODEL = {"w": np.ones((2, 2), np.float32)}
CONTROL = {"c": np.zeros(3, np.float32)}


@pytest.fixture
def requested():
    """A request and its ticket."""
    LocalGrid(lambda message, context: message, 1, {})  # sets the identity that Message() needs
    message, ticket = protocol.request(
        Payload(client=4, slot=1, arrays=MODEL, config={"rounds": 9}),
        Round(3, 0, (4,), 0),
        "run-1",
        node=77,
        model=spec_of(MODEL),
        extras={"control": spec_of(CONTROL)},
        ttl_s=60,
    )
    message.metadata.__dict__["_message_id"] = "m1"
    return message, ticket


@pytest.fixture
def asked(requested):
    message, ticket = requested
    return message, ticket.expected


def answer(message, arrays=MODEL, extras=None, examples=5, metrics=None):
    return protocol.reply(message, arrays, {"control": CONTROL} if extras is None else extras, examples, metrics or {})


def reason(reply, expected, **options):
    with pytest.raises(UploadError) as caught:
        check(reply, expected, **options)
    return caught.value.reason


def test_a_right_reply_passes_whole(asked):
    message, expected = asked
    upload = check(answer(message, metrics={"train-loss": 0.5}), expected)
    assert (upload.client, upload.slot, upload.num_examples) == (4, 1, 5)
    assert upload.metrics == {"train-loss": 0.5}
    assert (upload.arrays["w"] == 1).all()
    assert upload.extras["control"]["c"].shape == (3,)
    assert upload.nbytes == 4 * 4 + 3 * 4


@pytest.mark.parametrize("examples", [0, -1, 2**41, 3.0])
def test_examples_must_be_a_believable_count(asked, examples):
    message, expected = asked
    assert reason(answer(message, examples=examples), expected) == "bad_examples"


@pytest.mark.parametrize("examples", [1, MAX_EXAMPLES])
def test_one_example_and_the_most_that_is_believed_pass(asked, examples):
    message, expected = asked
    assert check(answer(message, examples=examples), expected).num_examples == examples


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1.01 * LARGEST_METRIC, -1e300])
def test_metrics_must_be_finite_and_bounded(asked, value):
    message, expected = asked
    assert reason(answer(message, metrics={"train-loss": value}), expected) == "bad_metrics"


@pytest.mark.parametrize("value", [-0.1, 1.1, 1e9])
def test_an_accuracy_is_a_share(asked, value):
    message, expected = asked
    assert reason(answer(message, metrics={"local-accuracy": value}), expected) == "bad_metrics"
    assert check(answer(message, metrics={"local-accuracy": 1.0}), expected).metrics == {"local-accuracy": 1.0}


def test_the_largest_metric_is_accepted(asked):
    message, expected = asked
    found = check(answer(message, metrics={"train-loss": -LARGEST_METRIC}), expected).metrics
    assert found == {"train-loss": -LARGEST_METRIC}


def test_lists_and_floods_of_metrics_are_rejected(asked):
    message, expected = asked
    assert reason(answer(message, metrics={"train-loss": [1.0, 2.0]}), expected) == "bad_metrics"
    flood = {f"m{i}": 1.0 for i in range(MAX_METRICS - 1)}  # the number of examples is one more
    assert check(answer(message, metrics=flood), expected).metrics == flood
    flood["one more"] = 1.0
    assert reason(answer(message, metrics=flood), expected) == "bad_metrics"


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("nonce", "0" * 32, "wrong_nonce"),
        ("nonce", 5, "wrong_nonce"),
        ("round", 2, "wrong_round"),
        ("exchange", 1, "wrong_round"),
        ("run", "run-2", "wrong_round"),
        ("slot", 0, "wrong_slot"),
        ("client", 5, "wrong_slot"),
    ],
)
def test_a_reply_to_another_request_is_rejected(asked, name, value, why):
    message, expected = asked
    reply = answer(message)
    reply.content.config_records["config"][name] = value
    assert reason(reply, expected) == why


def test_without_nonces_a_plain_flower_reply_is_enough(asked):
    message, expected = asked
    reply = answer(message)
    del reply.content["config"]
    assert reason(reply, expected) == "malformed_message"
    assert check(reply, expected, nonce=False).num_examples == 5


def test_records_missing_or_too_many_or_of_another_kind(asked):
    message, expected = asked
    assert reason(answer(message, extras={}), expected) == "malformed_message"
    more = answer(message)
    more.content["surprise"] = ConfigRecord({})
    assert reason(more, expected) == "malformed_message"
    for name, record in [
        ("arrays", MetricRecord({})),
        ("extra.control", ConfigRecord({})),
        ("metrics", ConfigRecord({})),
        ("config", encode({})),
    ]:
        twisted = answer(message)
        del twisted.content[name]
        twisted.content[name] = record
        assert reason(twisted, expected) == "malformed_message"


def test_an_error_reply_keeps_its_code(asked):
    message, expected = asked
    with pytest.raises(UploadError, match="code 2: boom") as caught:
        check(Message(Error(2, "boom"), reply_to=message), expected)
    assert caught.value.reason == "client_error"


def test_array_faults_come_through(asked):
    message, expected = asked
    bad = answer(message, arrays={"w": np.full((2, 2), np.nan, np.float32)})
    assert reason(bad, expected) == "non_finite"


def test_an_empty_reply_is_malformed(asked):
    message, expected = asked
    assert reason(Message(RecordDict(), reply_to=message), expected) == "malformed_message"


def test_an_inbox_knows_its_requests_and_tells_of_the_upload_that_won(requested):
    message, ticket = requested
    told = []
    inbox = Inbox(True, lambda client, error: told.append(error.reason), on_accepted=told.append)
    inbox.expect({"m1": ticket})
    assert [inbox.knows(one) for one in ("m1", "m2")] == [True, False]
    assert inbox.settle(answer(message)) is None
    assert told == [inbox.won[1]]


def test_only_a_long_text_loses_its_middle():
    assert shown("x" * SHOWN) == "x" * SHOWN
    assert shown("a" * SHOWN + "b") == "a" * (SHOWN // 2) + " ... " + "a" * (SHOWN // 2 - 1) + "b"
