import json
import random

import pytest

from fedcross.core.errors import StorageError
from fedcross.server import audit
from fedcross.server.audit import Audit, Head, check
from fedcross.server.commands.audit import devices, main
from tests.server.test_reply_log import Stopping
from tests.support.federation import run, session


def line(number, client=1, verdict="accepted", slot=0, **more):
    return {"round": number, "exchange": 0, "slot": slot, "client": client, "node": 7, "key": "ab"} | {
        "verdict": verdict,
        **more,
    }


def written(folder, rounds=20, name="mine"):
    """Write a chain of two lines a round, and the result that names its end."""
    folder.mkdir(exist_ok=True)
    trail = Audit(folder, name, "settings")
    trail.run_started({}, [])
    for number in range(1, rounds + 1):
        for slot in (0, 1):
            trail.add(line(number, client=number % 5, slot=slot, sent="x" * 8))
        trail.round_finished({})
    trail.run_ended(None)
    (folder / "result.json").write_text(json.dumps({"audit": trail.head._asdict()}))
    return folder / audit.NAME


def faults(path):
    return check(path.parent)[1]


def edited(data, generator):
    """Return `data` with one random edit."""
    lines = data.split(b"\n")[:-1]
    i, j = generator.randrange(len(lines)), generator.randrange(len(lines))
    kind = generator.choice(["byte", "cut", "end", "moved", "twice", "inserted"])
    if kind == "byte":
        place = generator.randrange(len(data))
        return data[:place] + bytes([data[place] ^ (1 << generator.randrange(7))]) + data[place + 1 :]
    if kind == "cut":
        del lines[i : i + generator.randint(1, 5)]
    elif kind == "end":
        return data[: generator.randrange(len(data))]
    elif kind == "moved":
        lines.insert(j, lines.pop(i))
    elif kind == "twice":
        lines.insert(j, lines[i])
    else:
        lines.insert(i, json.dumps({**json.loads(lines[i]), "client": 99}).encode())
    return b"".join(text + b"\n" for text in lines)


def test_200_random_edits_are_all_found(tmp_path):
    path = written(tmp_path / "run")
    whole, generator = path.read_bytes(), random.Random(25)
    assert faults(path) == []
    tried = 0
    while tried < 200:
        changed = edited(whole, generator)
        if changed != whole:
            tried += 1
            path.write_bytes(changed)
            assert faults(path), changed


def test_a_run_goes_on_only_behind_the_line_that_its_checkpoint_names(tmp_path):
    path = written(tmp_path / "run")
    head = Head.of(json.loads((tmp_path / "run/result.json").read_text())["audit"])
    Audit(path.parent, "mine", "settings", head, 20).run_ended(None)
    whole = path.read_bytes()
    for changed in (whole[:-30], whole[:-30] + b"7" + whole[-29:]):
        path.write_bytes(changed)
        with pytest.raises(StorageError, match="fedcross audit"):
            Audit(path.parent, "mine", "settings", head, 20)
    path.unlink()
    again = Audit(path.parent, "mine", "settings", head, 20)
    again.run_started({}, [])
    again.run_ended(None)
    assert json.loads(path.read_text())["after_round"] == 20


def test_every_slot_of_a_run_has_its_line_and_a_resumed_run_has_each_once(tmp_path, capsys):
    run(tmp_path / "whole", "log.audit=true", "checkpoint.log=true")
    cut = session(tmp_path / "cut", "log.audit=true", "checkpoint.log=true")
    cut.grid.__class__ = Stopping
    cut.grid.left = 5  # K = 3: in the second round, after two accepted replies
    with pytest.raises(KeyboardInterrupt):
        cut.execute()
    assert check(tmp_path / "cut")[1] == []
    run(tmp_path / "cut", "log.audit=true", "checkpoint.log=true", f"resume={tmp_path / 'cut'}")
    names = ("round", "slot", "client", "node", "sent", "received", "verdict")
    facts = [
        [tuple(one[name] for name in names) for one in check(tmp_path / folder)[0] if "verdict" in one]
        for folder in ("whole", "cut")
    ]
    assert len(facts[0]) == 9
    assert facts[0] == facts[1]
    lines, found, ends = check(tmp_path / "cut")
    assert (len(lines), found, set(ends)) == (10, [], {"result.json", "the newest checkpoint"})
    assert (tmp_path / "cut" / audit.NAME).stat().st_mode & 0o777 == 0o600
    assert main([str(tmp_path / "cut"), "--devices"]) == 0
    assert "accepted" in capsys.readouterr().out


def test_a_finished_run_that_is_made_longer_keeps_its_chain(tmp_path):
    run(tmp_path, "log.audit=true", "rounds=1")
    before = (tmp_path / audit.NAME).read_bytes()
    run(tmp_path, "rounds=2", f"resume={tmp_path}")
    assert (tmp_path / audit.NAME).read_bytes().startswith(before)
    assert check(tmp_path)[1] == []


def test_who_touched_the_model():
    lines = [
        line(1, client=4, slot=0),
        line(2, client=4, slot=2),
        line(2, client=5, verdict="quarantined"),
        line(3, client=6, verdict="lost", node=None, key=None),
        line(3, client=4, node=8, key="cd"),
        line(3, client=5, verdict="not_needed"),  # neither rejected nor lost
    ]
    table = [row.split() for row in devices(lines).splitlines()[1:]]
    assert table == [
        ["4", "7", "ab", "2", "0", "0", "1-2"],
        ["4", "8", "cd", "1", "0", "0", "3-3"],
        ["5", "7", "ab", "0", "1", "0", "-"],
        ["6", "-", "-", "0", "0", "1", "-"],
    ]
    assert [row.split()[0] for row in devices(lines, slot=2).splitlines()] == ["client", "4"]


@pytest.mark.parametrize("told", [b"[" * 100_000, b"7", b'{"slot":"x","verdict":"accepted"}'], ids=len)
def test_the_command_names_a_line_that_no_run_writes(tmp_path, capsys, told):
    path = written(tmp_path / "run")
    assert main([str(path.parent)]) == 0
    path.write_bytes(path.read_bytes() + told + b"\n")
    assert main([str(path.parent), "--devices"]) == 1
    assert "line 41" in capsys.readouterr().out
    with pytest.raises(StorageError, match="no audit trail"):
        main([str(tmp_path)])


def test_one_true_line_behind_the_end_of_the_run_is_found(tmp_path):
    path = written(tmp_path / "run", rounds=1)
    head = Head.of(json.loads((path.parent / "result.json").read_text())["audit"])
    more = Audit(path.parent, "mine", "settings", head, 1)
    more.add(line(2))
    more.run_started({}, [])
    more.run_ended(None)
    assert faults(path) == ["line 3: behind the last line that result.json names"]
