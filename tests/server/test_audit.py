import json
import os
import random
import re

import numpy as np
import pytest

from fedcross.core.errors import StorageError
from fedcross.server import audit
from fedcross.server.audit import Audit, Head, check, lines_of
from fedcross.server.commands.audit import devices, main
from tests.server.test_reply_log import Stopping
from tests.support.federation import run, session


def line(number, client=1, verdict="accepted", slot=0, **more):
    return {
        "round": number,
        "exchange": 0,
        "slot": slot,
        "client": client,
        "node": 7,
        "key": "ab",
        "verdict": verdict,
    } | more


def written(folder, rounds=20, run="mine"):
    """Write a chain of two lines a round, and the result that names its end."""
    folder.mkdir(exist_ok=True)
    trail = Audit(folder, run, "settings")
    for number in range(1, rounds + 1):
        for slot in (0, 1):
            trail.add(line(number, client=number % 5, slot=slot, sent="x" * 8))
        trail.flush()
    trail.close()
    (folder / "result.json").write_text(json.dumps({"audit": trail.head.plain()}))
    return folder / audit.NAME


def edits(data, generator):
    """Return `data` with one random edit, and the first line that is not as it was."""
    lines = data.split(b"\n")[:-1]
    kind = generator.choice(["byte", "cut", "end", "moved", "twice", "inserted", "newline"])
    i = generator.randrange(len(lines))
    if kind == "byte":
        place = generator.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << generator.randrange(7))]) + data[place + 1 :]
    if kind == "cut":
        del lines[i : i + generator.randint(1, 5)]
    elif kind == "end":
        return data[: generator.randrange(len(data))]
    elif kind == "moved":
        lines.insert(generator.choice([j for j in range(len(lines)) if j != i]), lines.pop(i))
    elif kind == "twice":
        lines.insert(generator.randrange(len(lines)), lines[i])
    elif kind == "inserted":
        lines.insert(i, json.dumps({**json.loads(lines[i]), "client": 99}).encode())
    else:
        lines.insert(generator.randrange(len(lines) + 1), b"")
    return b"".join(text + b"\n" for text in lines)


@pytest.mark.slow
def test_200_random_edits_are_all_found_and_named(tmp_path):
    path = written(tmp_path / "run")
    whole, generator = path.read_bytes(), random.Random(25)
    assert check(path.parent).faults == []
    tried = 0
    while tried < 200:
        changed = edits(whole, generator)
        if changed == whole:
            continue
        tried += 1
        path.write_bytes(changed)
        found = check(path.parent)
        assert found.faults, changed
        assert all(re.match(r"line \d+: ", fault) for fault in found.faults)


def test_a_whole_chain_computed_again_is_found_by_its_end(tmp_path):
    path = written(tmp_path / "run")
    honest = path.read_bytes().split(b"\n")
    forged = Audit(tmp_path / "run", "mine", "settings")
    for text in honest[1:-1]:
        facts = {name: value for name, value in json.loads(text).items() if name not in ("line", "run", "before")}
        forged.add({**facts, "client": 0})
    forged.flush()
    forged.close()
    assert check(path.parent).faults == ["line 40: not the line that result.json names"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda lines: [*lines[:5], *lines[6:]], "line 5: here stands line 6, where line 5 belongs"),
        (lambda lines: lines[:-3], "line 38: missing; result.json says that the last line is 40"),
        (lambda lines: [*lines[:9], lines[10], lines[9], *lines[11:]], "line 9: here stands line 10"),
        (
            lambda lines: [*lines[:4], lines[4].replace(b'"client":2', b'"client":3'), *lines[5:]],
            "line 5: line 4 is",
        ),
        (lambda lines: [*lines, b'{"line":41,"run":"mine"}'], "line 41: line 40 is"),
    ],
    ids=["cut", "end", "swapped", "edited", "added"],
)
def test_a_fault_says_where_it_is(tmp_path, change, fault):
    path = written(tmp_path / "run")
    path.write_bytes(b"".join(text + b"\n" for text in change(path.read_bytes().split(b"\n")[:-1])))
    assert check(path.parent).faults[0].startswith(fault)


def test_a_pipe_in_the_place_of_the_trail_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / audit.NAME)
    with pytest.raises(StorageError, match="no regular file"):
        check(tmp_path)


def test_lines_of_another_run_are_named(tmp_path):
    path, other = written(tmp_path / "run"), written(tmp_path / "other", run="theirs")
    mine, theirs = (one.read_bytes().splitlines(keepends=True) for one in (path, other))
    path.write_bytes(b"".join([*mine[:7], theirs[7], *mine[8:]]))
    assert check(path.parent).faults[0] == "line 7: a line of run theirs, this is run mine"


def test_a_run_cannot_go_on_behind_a_changed_line(tmp_path):
    path = written(tmp_path / "run")
    head = Head.of(json.loads((tmp_path / "run/result.json").read_text())["audit"])
    path.write_bytes(path.read_bytes().replace(b'"client":0', b'"client":4', 1))
    Audit(path.parent, "mine", "settings", head, 20).close()  # an early line: the check tells it, resume need not
    assert check(path.parent).faults
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(StorageError, match="fedcross audit"):
        Audit(path.parent, "mine", "settings", head, 20)
    path.unlink()
    again = Audit(path.parent, "mine", "settings", head, 20)
    again.flush()
    again.close()
    assert json.loads(path.read_text())["after_round"] == 20


def test_every_slot_of_a_run_has_its_line_and_a_resumed_run_has_each_once(tmp_path, capsys):
    run(tmp_path / "whole", "log.audit=true", "checkpoint.log=true")
    cut = session(tmp_path / "cut", "log.audit=true", "checkpoint.log=true")
    cut.grid.__class__ = Stopping
    cut.grid.left = 5  # K = 3: in the second round, after two accepted replies
    with pytest.raises(KeyboardInterrupt):
        cut.execute()
    assert check(tmp_path / "cut").faults == []
    run(tmp_path / "cut", "log.audit=true", "checkpoint.log=true", f"resume={tmp_path / 'cut'}")
    facts = [
        [
            tuple(one[name] for name in ("round", "slot", "client", "node", "sent", "received", "verdict"))
            for one in lines
        ]
        for lines in map(lines_of, (tmp_path / "whole", tmp_path / "cut"))
    ]
    assert len(facts[0]) == 9
    assert facts[0] == facts[1]
    found = check(tmp_path / "cut")
    assert (found.faults, found.lines, found.anchor) == ([], 10, "result.json and the newest checkpoint")
    assert (tmp_path / "cut" / audit.NAME).stat().st_mode & 0o777 == 0o600
    assert main([str(tmp_path / "cut"), "--devices"]) == 0
    assert "had an upload accepted" in capsys.readouterr().out


def test_a_finished_run_that_is_made_longer_keeps_its_chain(tmp_path):
    run(tmp_path, "log.audit=true", "rounds=1")
    before = (tmp_path / audit.NAME).read_bytes()
    run(tmp_path, "rounds=2", f"resume={tmp_path}")
    assert (tmp_path / audit.NAME).read_bytes().startswith(before)
    assert check(tmp_path).faults == []


def test_every_visit_of_an_asynchronous_run_has_its_line(tmp_path):
    run(
        tmp_path,
        "log.audit=true",
        "method=fedcross_async",
        "method.selection=in_order",
        "devices=uniform",
        "clock.deadline_s=300",
    )
    visits = [json.loads(text) for text in (tmp_path / "visits.jsonl").read_text().splitlines()]
    assert {one["accepted"] for one in visits} == {True, False}
    found = [(one["visit"], one["slot"], one["client"], one["verdict"] == "accepted") for one in lines_of(tmp_path)]
    assert found == [(one["visit"], one["slot"], one["client"], one["accepted"]) for one in visits]
    assert check(tmp_path).faults == []


def test_who_touched_the_model():
    lines = [
        line(1, client=4, slot=0),
        line(2, client=4, slot=2),
        line(2, client=5, verdict="quarantined"),
        line(3, client=6, verdict="lost", node=None, key=None),
        line(3, client=4, node=8, key="cd"),
    ]
    found = devices(lines)
    assert [(one.client, one.key, sorted(one.rounds), sorted(one.slots), one.rejected) for one in found] == [
        (4, "ab", [1, 2], [0, 2], 0),
        (4, "cd", [3], [0], 0),
        (5, "ab", [], [], 1),
        (6, None, [], [], 0),
    ]
    assert [one.client for one in devices(lines, slot=2)] == [4]


def test_the_command_says_what_is_wrong(tmp_path, capsys):
    path = written(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 0
    path.write_bytes(path.read_bytes()[: -1 - np.random.default_rng(1).integers(200)])
    assert main([str(tmp_path / "run")]) == 1
    assert "audit.jsonl was changed:\n  line " in capsys.readouterr().err
    with pytest.raises(StorageError, match="no audit trail"):
        main([str(tmp_path)])
    with pytest.raises(StorageError, match="none: no such run folder"):
        main([str(tmp_path / "none")])


def test_a_run_that_goes_on_between_two_reads_is_not_called_changed(tmp_path, monkeypatch):
    path = written(tmp_path / "run")
    read, more = audit._texts, []

    def late(place):
        found = read(place)
        if not more:  # the run writes its next round and its anchor just after the lines were read
            trail = Audit(path.parent, "mine", "settings", Head.of(json.loads(result.read_text())["audit"]), 20)
            trail.add(line(21))
            trail.flush()
            trail.close()
            more.append(result.write_text(json.dumps({"audit": trail.head.plain()})))
        return found

    result = path.parent / "result.json"
    monkeypatch.setattr(audit, "_texts", late)
    assert check(path.parent).faults == []
    assert more
    assert check(path.parent).lines == 42


@pytest.mark.parametrize("why", ["changed", "begins after round 6", "where the trail ends"])
def test_nothing_is_certain_of_a_trail_that_does_not_hold_the_whole_run(tmp_path, capsys, why):
    path = written(tmp_path / "run")
    assert main([str(path.parent), "--devices"]) == 0
    assert "that is certain" in capsys.readouterr().out
    if why == "changed":
        path.write_bytes(path.read_bytes().replace(b'"client":2', b'"client":3', 1))
    elif why == "where the trail ends":
        (path.parent / "result.json").unlink()
    else:
        path.unlink()
        trail = Audit(path.parent, "mine", "settings", None, 6)
        trail.add(line(7))
        trail.flush()
        trail.close()
        (path.parent / "result.json").write_text(json.dumps({"audit": trail.head.plain()}))
    assert main([str(path.parent), "--devices"]) == (why == "changed")
    said = capsys.readouterr().out
    assert "certain" not in said
    assert why in said


@pytest.mark.parametrize(
    "told", [b"[" * 100_000, b'{"slot":"x","verdict":"accepted"}', b'{"client":[1],"verdict":"accepted"}'], ids=len
)
def test_a_line_that_no_run_writes_is_named_and_ends_nothing(tmp_path, capsys, told):
    path = written(tmp_path / "run")
    path.write_bytes(path.read_bytes() + told + b"\n")
    assert main([str(path.parent), "--devices"]) == 1
    out, err = capsys.readouterr()
    assert "line 41: not a line of an audit trail" in err
    assert "5 devices" in out


@pytest.mark.parametrize("slot", ["99", "-1"])
def test_a_slot_that_the_trail_does_not_know_is_said(tmp_path, capsys, slot):
    path = written(tmp_path / "run")
    assert main([str(path.parent), "--devices", f"--slot={slot}"]) == 2
    out, err = capsys.readouterr()
    assert "certain" not in out
    assert "slots 0 to 1" in err
