"""The guard: each reason for which it rejects a reply."""

import subprocess
import sys

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord

from fedcross.client.app import place_of
from fedcross.core.errors import UploadError
from fedcross.engines.grid import identify
from fedcross.strategies.method import Task, Upload
from fedcross.strategies.round.slot import digest_of
from fedcross.strategies.wire.records import SCALES, answer, check, encode, request
from tests.support.replies import payload_of

MODEL = {"w": np.ones((2, 3), np.float32), "n": np.array(3)}
PAYLOAD = payload_of(Task(4, 1, MODEL, returns={"c": {"v": ((2,), "float64")}}))
GOOD = {"c": {"v": np.zeros(2)}}


def check_reply(change=lambda content: None, *, error=None, nonce=True):
    """Return what the guard makes of a good reply that `change` has changed."""
    identify()
    message, asked = request(PAYLOAD, 1, {"run": "run", "round": 7, "exchange": 0}, 60)
    message.metadata.__dict__["_message_id"] = "m"
    content = answer(message.content, MODEL, GOOD, 5, {"train-loss": 0.5})
    change(content)
    reply = Message(error, reply_to=message) if error else Message(content, reply_to=message)
    return check(reply, asked, nonce=nonce)


def config(**values):
    return lambda content: content.config_records["config"].update(values)


def metrics(**values):
    def change(content):
        found = {**content.metric_records["metrics"], **{n.replace("_", "-"): v for n, v in values.items()}}
        content["metrics"] = MetricRecord(found)

    return change


def arrays(**values):
    return lambda content: content.__setitem__("arrays", encode({**MODEL, **values}))


def raw(**values):
    """Replace attributes of array w."""

    def change(content):
        record = content.array_records["arrays"]
        one = record["w"]
        own = {"dtype": one.dtype, "shape": one.shape, "stype": one.stype, "data": one.data} | values
        content["arrays"] = ArrayRecord({**dict(record), "w": Array(**own)})

    return change


def without(*names):
    return lambda content: [content.pop(name) for name in names]


def test_a_good_reply_is_what_was_asked_for():
    upload = check_reply()
    assert (upload["num_examples"], upload["metrics"], upload["nbytes"]) == (5, {"train-loss": 0.5}, 24 + 8 + 16)
    assert not upload["arrays"]["w"].flags.writeable


REJECTED = {
    "nonce": (config(nonce="other"), "wrong_nonce"),
    "nonce of another type": (config(nonce=7), "wrong_nonce"),
    "run": (config(run="another"), "wrong_round"),
    "round": (config(round=6), "wrong_round"),
    "exchange": (config(exchange=1), "wrong_round"),
    "slot": (config(slot=2), "wrong_slot"),
    "client": (config(client=5), "wrong_slot"),
    "no config": (without("config"), "malformed_message"),
    "no metrics": (without("metrics"), "malformed_message"),
    "no extras": (without("extra.c"), "malformed_message"),
    "more records": (lambda c: c.__setitem__("x", ConfigRecord({})), "malformed_message"),
    "arrays of another kind": (lambda c: c.__setitem__("arrays", ConfigRecord({})), "malformed_message"),
    "examples 0": (metrics(num_examples=0), "bad_examples"),
    "examples nan": (metrics(num_examples=float("nan")), "bad_examples"),
    "too many examples": (metrics(num_examples=2**41), "bad_examples"),
    "loss nan": (metrics(train_loss=float("nan")), "bad_metrics"),
    "huge loss": (metrics(train_loss=1e10), "bad_metrics"),
    "accuracy 2": (metrics(local_accuracy=2.0), "bad_metrics"),
    "many metrics": (metrics(**{f"m{i}": 1.0 for i in range(64)}), "bad_metrics"),
    "NaN": (arrays(w=np.full((2, 3), np.nan, np.float32)), "non_finite"),
    "infinity": (arrays(w=np.full((2, 3), np.inf, np.float32)), "non_finite"),
    "shape": (arrays(w=np.ones((3, 2), np.float32)), "wrong_shape"),
    "dtype": (arrays(w=np.ones((2, 3))), "wrong_dtype"),
    "extra array": (arrays(x=np.ones(1)), "extra_array"),
    "missing array": (lambda c: c.__setitem__("arrays", encode({"w": MODEL["w"]})), "missing_array"),
    "bytes": (raw(data=b"garbage"), "malformed_array"),
    "short": (lambda c: raw(data=c.array_records["arrays"]["w"].data[:-1])(c), "malformed_array"),
    "serialisation": (raw(stype="pickle"), "malformed_array"),
    "an error of the client": (
        lambda c: (c.clear(), c.__setitem__("config", ConfigRecord({"error": "ValueError"}))), "wrong_nonce",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTED)
def test_a_reply_is_rejected_with_its_reason(name):
    change, reason = REJECTED[name]
    with pytest.raises(UploadError) as caught:
        check_reply(change)
    assert caught.value.reason == reason


def test_errors_of_clients_and_of_the_superlink():
    with pytest.raises(UploadError, match="broken") as caught:
        check_reply(error=Error(2, "broken"))
    assert caught.value.reason == "client_error"


def test_an_error_over_a_network_says_where_it_is():
    def failed(content):
        origin = dict(content.config_records["config"])
        for name in list(content):
            del content[name]
        told = {"error": "NameError", "detail": "name 'x' is not defined", "file": "loss.py", "line": 7}
        content["config"] = ConfigRecord({**origin, **told})

    with pytest.raises(UploadError, match=r"NameError.*'x'.*loss\.py.*7"):
        check_reply(failed)


def test_a_plain_flower_client_needs_no_nonce():
    assert check_reply(without("config"), nonce=False)["num_examples"] == 5


def test_the_client_app_is_imported_without_torch():
    code = "import fedcross.client.app, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_error_names_the_last_line_of_the_users_code():
    with pytest.raises(ValueError, match="x") as caught:
        exec(compile("\n\nint('x')", "/somewhere/loss.py", "exec"), {})
    assert place_of(caught.value) == ("/somewhere/loss.py", 3)
    assert place_of(ValueError("nothing")) == ("", 0)


def test_a_digest_covers_model_extras_and_scales():
    """Each of three uploads differs from the first in one of the three."""
    coded, scales, extras = {"w": np.int8([127])}, {SCALES: np.float32([1])}, {"c": {"v": np.zeros(2)}}
    uploads = [
        Upload(0, 0, coded, extras, 1, {}, scales=scales),
        Upload(0, 0, {"w": np.int8([126])}, extras, 1, {}, scales=scales),
        Upload(0, 0, coded, {"c": {"v": np.ones(2)}}, 1, {}, scales=scales),
        Upload(0, 0, coded, extras, 1, {}, scales={SCALES: np.float32([2])}),
    ]
    assert len({digest_of(upload) for upload in uploads}) == 4
