from collections import Counter

import numpy as np
import pytest

from fedcross.core.errors import UploadError
from fedcross.strategies.wire.records import PACKED, decode, encode, spec_of
from tests.support.bad_client import KINDS, malicious
from tests.support.federation import run, same
from tests.support.scale import rss, size

#: Composes many configurations or trains several federations.
pytestmark = pytest.mark.slow

LIMIT = 64 * 2**20


def packed_bytes(model):
    return encode(model, packed=True)[PACKED].data


def federation(rounds):
    return (f"rounds={rounds}", "partition.clients=12", "clients_per_round=12", f"evaluate_every={rounds}")


def bad(client):
    """Ten of the twelve clients."""
    return client >= 2


def test_malformed_replies_of_all_kinds_are_counted_and_leave_no_trace(tmp_path):
    rounds = size(20, 100)  # ten bad replies each
    app, sent = malicious(bad)
    run(tmp_path / "warm", *federation(2), app=malicious(bad)[0])
    before = rss()
    seen: Counter[str] = Counter()
    attacked = run(tmp_path / "attacked", *federation(rounds), app=Counting(app, seen))
    growth = rss() - before
    print(f"{len(sent)} malformed replies, RSS growth {growth / 2**20:.1f} MiB")  # seen with pytest -s
    assert growth < LIMIT
    assert len(sent) == 10 * rounds
    assert set(sent) == set(KINDS)
    assert seen["bad"] == 10 * rounds
    assert set(attacked.driver.ledger.clients.accepted) == {0, 1}
    reasons = Counter(KINDS[kind][1] for kind in sent)
    told: Counter[str] = Counter()
    for line in lines(tmp_path / "attacked"):
        assert (line["clients"], line["dropped"]) == (12, 10)
        told.update(line["rejected"])
    assert told == reasons
    quiet = run(tmp_path / "quiet", *federation(rounds), app=malicious(bad, silent=True)[0])
    assert same(attacked.driver.global_model(), quiet.driver.global_model())


class Counting:
    """Counts what goes through an app."""

    def __init__(self, app, seen):
        self.app, self.seen = app, seen

    def __call__(self, message, context):
        answer = self.app(message, context)
        if message.metadata.message_type == "train":
            self.seen["bad" if bad(message.content.config_records["config"]["client"]) else "honest"] += 1
        return answer


def lines(folder):
    import json

    return [json.loads(text) for text in (folder / "metrics.jsonl").read_text().splitlines()]


MODEL = {
    "w": np.linspace(-1, 1, 24, dtype=np.float32).reshape(4, 6),
    "b": np.arange(5, dtype=np.float64),
    "n": np.array(7, np.int64),
}
SPEC = spec_of(MODEL)
PACKED_HEAD = len(packed_bytes(MODEL)) - sum(array.nbytes for array in MODEL.values())


def fuzzed(generator, packed):
    """Return a record, `packed` or plain, with one to four faults in headers, declarations, lengths or names."""
    from flwr.app import Array, ArrayRecord

    record = {name: [a.dtype, a.shape, a.stype, a.data] for name, a in encode(MODEL, packed).items()}
    cut = set()  # what was cut off is not filled up again: values of the right length would be nobody's fault
    for _ in range(generator.integers(1, 5)):
        name = list(record)[generator.integers(len(record))]
        entry = record[name]
        data = bytearray(entry[3])
        head = max(min(len(data), PACKED_HEAD if packed else 128), 1)
        match generator.integers(10):
            case 0 | 1 | 2 if data:  # any byte of the header
                data[generator.integers(min(head, len(data)))] = generator.integers(256)
            case 3:
                cut.add(name)
                data = data[: generator.integers(len(data) + 1)]
            case 4 if name not in cut:
                data += generator.bytes(int(generator.integers(1, 4000)))
            case 5:
                data = bytearray(generator.bytes(int(generator.integers(300))))
            case 6:
                entry[0] = ["float16", "object", "complex128", "float32", "<U9", "V8", ""][generator.integers(7)]
            case 7:
                entry[1] = tuple(int(n) for n in generator.integers(-2, 2**40, generator.integers(0, 4)))
            case 8:
                record[f"{name}\0{generator.integers(9)}"] = entry
            case _:
                entry[2] = "pickle"
        entry[3] = bytes(data)
    return ArrayRecord({name: Array(*entry) for name, entry in record.items()})


def test_fuzzed_records_are_rejected_or_hold_exactly_what_was_sent():
    generator = np.random.default_rng(5)
    outcomes: Counter[str] = Counter()
    for trial in range(size(10_000, 100_000)):
        if trial == 1000:  # whatever is loaded or cached once is there by now
            before = rss()
        try:
            found = decode(fuzzed(generator, packed=trial % 2 == 1), SPEC)
        except UploadError as error:
            outcomes[error.reason] += 1
            continue
        outcomes["harmless"] += 1  # a space of the header changed, say
        assert same(dict(sorted(found.items())), dict(sorted(MODEL.items())))
    growth = rss() - before
    print(f"{outcomes.total()} decodes, RSS growth {growth / 2**20:.1f} MiB, {dict(outcomes)}")
    assert growth < LIMIT
    assert outcomes["harmless"] < 0.1 * outcomes.total()
    assert {"extra_array", "wrong_dtype", "wrong_shape", "malformed_array"} <= set(outcomes)
