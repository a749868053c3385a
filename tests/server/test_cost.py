"""What a sweep would take: every distinct run once, what is done left out, one measurement for jobs of equal speed."""

import json

import pytest

from fedcross.conf.schema import load
from fedcross.core.errors import DataError, FederationError
from fedcross.server.check import checked_plan
from fedcross.server.cost import Cell, cells, measure, paces, show
from fedcross.server.pace import Pace, Seconds, _round, _shortest, measured, read
from fedcross.server.sweep import plan
from tests.server.commands.test_run import SMALL, call

#: Composes many configurations or trains several federations.
pytestmark = pytest.mark.slow


def test_cells_count_distinct_runs_and_what_is_left():
    line = ["method=fedavg,fedcross", "method.alpha=0.8,0.9", "seed=1,2,3", "rounds=25", "evaluate_every=10"]
    fedavg, fedcross = cells(plan(["-m"], [*SMALL, *line]))
    # FedAvg has no alpha: 3 seeds; FedCross 2 alphas x 3 seeds. Evaluated after rounds 10, 20 and the last, 25.
    assert (fedavg.names, fedavg.runs, fedavg.rounds, fedavg.evaluations) == (
        ("fedavg", "digits", "mlp", "local"), 3, 75, 9,
    )  # fmt: skip
    assert (fedcross.runs, fedcross.rounds, fedcross.evaluations) == (6, 150, 18)
    # 150 rounds of 20 s and 18 evaluations of 100 s are 4800 s.
    assert fedcross.hours((20.0, 100.0)) == pytest.approx(4800 / 3600)


def test_jobs_of_other_speed_are_measured_apart():
    found = cells(plan(["-m"], [*SMALL, "method=fedavg", "clients_per_round=2,4", "train.epochs=1,3", "seed=1,2"]))
    assert [cell.runs for cell in found] == [2, 2, 2, 2]


def test_jobs_with_other_losses_are_measured_apart():
    own = ["-m", *SMALL, "method=fedct", "seed=1,2"]
    assert [cell.runs for cell in cells(plan(own[:1], [*own[1:], "method.base=fedavg,moon"]))] == [2, 2]
    assert [cell.runs for cell in cells(plan(own[:1], [*own[1:], "method.kappa=0,1", "method.eta=0,0.1"]))] == [2] * 4


@pytest.mark.parametrize(
    ("line", "runs"),
    [
        (["model.hidden=[8],[4096]"], [1, 1]),
        (["method=fedasync", "clock.deadline_s=115,5000"], [1, 1]),
        (["task.limit=100,200", "task.augment.flip=false,true"], [1, 1, 1, 1]),
        (["method=fedgen", "method.generator_steps=1,50"], [1, 1]),
        (["method=fedcross", "method.selection=in_order,lowest_similarity"], [1, 1]),
        (["method=fedsam", "method.rho=0,0.1,0.2"], [1, 2]),  # 0 is FedAvg: half the passes
        (["train.clip=null,1,5"], [1, 2]),
        (["method=fedcross", "method.alpha=0.8,0.9", "train.lr=0.1,0.01", "seed=1,2"], [8]),
        (["method=fedavg", "partition=dirichlet", "partition.beta=0.1,1"], [2]),
        (["method=fedct", "method.host_lr=null,0.1", "method.kappa=1,2", "train.momentum=0,0.5"], [8]),
    ],
)
def test_every_setting_that_changes_the_time_of_a_round_and_no_other_makes_a_row(line, runs):
    assert [cell.runs for cell in cells(plan(["-m"], [*SMALL, *line]))] == runs


def test_a_round_is_put_together_from_its_steps():
    # Clients of 10 and 30 examples, batches of 8: 2 and 4 steps, 3 and 20 on average. An epoch: 3 * 2 + 20 * .5 = 16.
    # At home 5 epochs, at each of two hosts 2: 9 epochs, 3 visits of 7 s: 165 s. Five clients on 2 workers: 3 turns.
    own = ["method=fedexg", "method.exchanges=2", "method.host_epochs=2", "train.epochs=5", "train.batch=8"]
    config = load([*own, "clients_per_round=5", "engine.workers=2"])
    seconds = Seconds(step=2.0, example=0.5, visit=7.0, server=1.0, tested=0.0)
    assert _round(config, seconds, [10, 30]) == 3 * 165 + 1
    plain = load(["method=fedavg", "train.epochs=1", "train.batch=8", "clients_per_round=5", "engine.workers=1"])
    assert _round(plain, seconds, [10, 30]) == 5 * (7 + 16) + 1
    assert _round(plain, seconds, [10, 30], 0.25) == 0.25 * 5 * (7 + 16) + 1  # of four visits, three are lost


class Simulated:
    """A bench whose visits take `fixed` seconds, and for each step `step` seconds and `example` for each example."""

    fixed, step, example, spent = 0.0, 0.0, 0.0, 0.0

    def __init__(self, trial, folder):
        pass

    def visit(self, examples, steps=1):
        seconds = self.fixed + steps * (self.step + examples * self.example)
        Simulated.spent += seconds
        return seconds, 0.5

    def evaluation(self):
        return 0.25


@pytest.mark.parametrize(
    ("fixed", "step", "example", "most"),
    [
        (0.001, 0.004, 0.0005, 2),  # LeNet-5: all steps, twice
        (0.002, 0.02, 0.005, 3),
        (0.01, 0.05, 0.03, 9),  # ResNet-20
        (0.02, 0.03, 0.09, 9),  # ResNet-18: just quick enough for several steps
        (0.16, 0.004, 0.0005, 2),  # LeNet-5 on a busy machine: the visit is slow, not the step
    ],
)
def test_the_estimate_is_exact_without_noise_and_the_measurement_short(monkeypatch, fixed, step, example, most):
    monkeypatch.setattr("fedcross.server.pace._Bench", Simulated)
    for name, value in {"fixed": fixed, "step": step, "example": example, "spent": 0.0}.items():
        monkeypatch.setattr(Simulated, name, value)
    found = measured([])
    assert (found.step, found.example, found.visit) == pytest.approx((step, example, fixed))
    assert (found.server, found.tested) == (0.5, 0.25)
    assert Simulated.spent < most  # seconds for each method, task and model of a sweep


@pytest.mark.parametrize(("seconds", "spent"), [(0.25, 3 + 3 + 7), (1.0, 3 + 7)])
def test_a_slow_step_is_measured_with_one_and_three_examples_and_no_more(monkeypatch, seconds, spent):
    monkeypatch.setattr("fedcross.server.pace._Bench", Simulated)
    for name, value in {"fixed": 0.0, "step": seconds, "example": 2 * seconds, "spent": 0.0}.items():
        monkeypatch.setattr(Simulated, name, value)
    found = measured([])
    assert (found.step, found.example, found.visit) == pytest.approx((seconds, 2 * seconds, 0.0))
    assert Simulated.spent == spent * seconds  # a very slow one without a warm-up


def test_what_the_first_visit_compiles_is_no_slow_step(monkeypatch):
    """LeNet-5 whose first visit compiles for five seconds."""

    class Compiling(Simulated):
        fixed, step, example, first = 0.001, 0.004, 0.0005, 5.0

        def visit(self, examples, steps=1):
            once, self.first = self.first, 0.0
            seconds, server = super().visit(examples, steps)
            return seconds + once, server

    monkeypatch.setattr("fedcross.server.pace._Bench", Compiling)
    found = measured([])
    assert (found.step, found.example, found.visit) == pytest.approx((0.004, 0.0005, 0.001))


def test_every_distinct_job_is_composed_once(monkeypatch):
    from fedcross.conf import compose

    composed = []
    whole = compose._composition
    monkeypatch.setattr(compose, "_composition", lambda *given: composed.append(given) or whole(*given))
    line = ["-m", *SMALL, "method=fedavg,fedcross", "train.momentum=0.25", "seed=1,2,3"]
    found = cells(checked_plan(line))
    before = len(composed)
    assert [load(cell.job).names["method"] for cell in found] == ["fedavg", "fedcross"]
    assert [cell.runs for cell in found] == [3, 3]
    assert len(composed) == before


@pytest.mark.parametrize("method", ["fedavg", "fedct", "moon", "fedgen", "scaffold"])
def test_a_few_steps_are_measured_for_every_kind_of_method(method):
    job = [*SMALL, f"method={method}", "rounds=1000"]
    pace = Pace()
    seconds, evaluation = pace(read(job))
    assert seconds > 0
    assert evaluation > 0
    more = pace(read([*job, "clients_per_round=6", "seed=3", "engine.workers=1"]))[0]
    assert more > seconds  # the same measurement, more clients and fewer workers
    assert len(pace._known) == 1


def test_visits_are_measured_whatever_the_clock_repeats_or_loses(tmp_path):
    """A trial has one client, so it can repeat no record; a visit beyond the deadline trains nothing."""
    lost = tmp_path / "visits.jsonl"
    line = '{{"visit": {0}, "slot": {1}, "client": {1}, "start": 0.0, "finish": 300.0, "accepted": false}}\n'
    lost.write_text("".join(line.format(visit, visit % 3) for visit in range(3)))
    for clock in (["clock=replay", f"clock.events={lost}"], ["clock.deadline_s=0.001"]):
        job = [*SMALL, "method=fedbuff", "method.buffer=1", "clients_per_round=3", "rounds=1", *clock]
        trial = read(job).trial
        assert "clock=virtual" in trial
        assert not any("events" in one or "0.001" in one for one in trial)
        assert Pace()(read(job))[0] > 0


def replayed(path, accepted):
    """Write a record of nine visits by three clients in three slots, of which those in `accepted` are accepted."""
    line = '{{"visit": {0}, "slot": {1}, "client": {1}, "start": {2}.0, "finish": {3}.0, "accepted": {4}}}\n'
    rows = [(n, n % 3, n // 3, 1 + n // 3, str(n in accepted).lower()) for n in range(9)]
    path.write_text("".join(line.format(*row) for row in rows))
    return [*SMALL, "method=fedasync", "engine.workers=1", "rounds=3", "clock=replay", f"clock.events={path}"]


def test_lost_visits_take_no_time(monkeypatch, tmp_path):
    """By the record, and by the virtual clock: `uniform` has devices that train 100, 150, 200, 300 and 500 s."""
    monkeypatch.setattr("fedcross.server.pace.measured", lambda trial: Seconds(100.0, 0.0, 0.0, 7.0, 0.0))
    usual = [*SMALL, "method=fedasync", "engine.workers=1", "rounds=50", "devices=uniform"]
    whole = Pace()(read(usual))[0] - 7
    record = replayed(tmp_path / "visits.jsonl", {3, 4, 8})
    assert read(record).share == pytest.approx(3 / 9)
    assert Pace()(read(record))[0] == pytest.approx(whole * 3 / 9 + 7)
    some, all_in_time = read([*usual, "clock.deadline_s=180"]), read([*usual, "clock.deadline_s=5000"])
    assert 0.1 < some.share < 0.9
    assert all_in_time.share == 1
    assert Pace()(some)[0] == pytest.approx(whole * some.share + 7)


def test_a_run_whose_first_rounds_train_nothing_has_a_pace(tmp_path):
    """Both from its steps and from whole rounds, which one of this size has measured."""
    job = replayed(tmp_path / "visits.jsonl", {6, 7, 8})
    ((seconds, evaluation),) = paces([job])
    assert seconds > 0
    assert evaluation >= 0


def test_a_row_whose_rounds_cannot_be_measured_has_its_reason_and_the_others_their_numbers(monkeypatch, tmp_path):
    """One that would train nothing at all, one whose replies all miss the deadline, one that fails, and a sound one."""
    idle = replayed(tmp_path / "visits.jsonl", set())
    sound = [*SMALL, "engine.workers=1", "method=fedavg"]
    late = [*SMALL, "engine.workers=1", "method=fedprox", "rounds=7"]
    broken = [*sound, "train.lr=1"]

    def launched(overrides, folder):
        number = int(next(o for o in reversed(overrides) if o.startswith("rounds=")).removeprefix("rounds="))
        row = {"seconds": 3.0, "seconds_training": 1.0, "seconds_aggregation": 0.5, "train_loss": 0.1, "bytes_up": 9}
        nothing = "method=fedprox" in overrides
        if "train.lr=1" in overrides:
            raise FederationError("Round 1: too large.")
        rows = [row | ({"train_loss": None, "bytes_up": 0} if nothing else {})] * number
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        if nothing:
            raise FederationError(f"{number} rounds and not one accepted reply")

    monkeypatch.setattr("fedcross.server.pace.measured", lambda trial: Seconds(1e-6, 0.0, 0.0, 0.0, 0.0))
    monkeypatch.setattr("fedcross.server.launch.launch", launched)
    told = paces([idle, late, broken, sound])
    assert told[3] == (1.5, 1.5)
    assert "accepted none of its visits" in told[0]
    assert "no reply was accepted in the first 4 rounds" in told[1]
    assert told[2] == "Round 1: too large."
    with pytest.raises(FederationError, match="too large"):
        paces([broken])


def test_of_several_short_evaluations_the_least_disturbed_one_counts(monkeypatch):
    """Measured in one run: the first round starts everything, and what runs beside disturbs the others."""
    rests = [9.0, 0.0283, 0.0771, 0.0947, 0.0717, 0.00346, 0.05, 0.06, 0.07, 0.08]

    def launched(overrides, folder):
        number = int(next(o for o in reversed(overrides) if o.startswith("rounds=")).removeprefix("rounds="))
        row = {"seconds_training": 0.25, "seconds_aggregation": 0.5, "train_loss": 0.1, "bytes_up": 9}
        rows = [row | {"seconds": 0.75 + rest} for rest in rests[:number]] if number > 1 else [row | {"seconds": 0.8}]
        if "train.batch=7" in overrides:  # so short that ten rounds are measured
            rows = [
                one | {"seconds_training": 0.0, "seconds_aggregation": 0.0, "seconds": one["seconds"] - 0.75}
                for one in rows
            ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))

    monkeypatch.setattr("fedcross.server.launch.launch", launched)
    for own, evaluation in (([], 0.0283), (["train.batch=7"], 0.00346)):
        job = [*SMALL, *own]
        assert measure(job, read(job))[1] == pytest.approx(evaluation)


def test_an_evaluation_in_this_process_is_repeated_while_it_is_short(monkeypatch):
    taken = iter([0.5, 0.04, 0.03, 0.05, 0.01, 0.02, *[0.02] * 100])
    calls, now = [], [0.0]

    def once():
        calls.append(next(taken))
        now[0] += calls[-1]

    monkeypatch.setattr("fedcross.server.pace.time.process_time", lambda: now[0])
    assert _shortest(once) == pytest.approx(0.03)  # three after the first one are over 0.1 s together
    taken, calls[:] = iter([0.5, 0.02, 0.02, 0.02, 0.003, *[0.003] * 100]), []
    assert _shortest(once) == pytest.approx(0.003)
    assert len(calls) == 1 + 3 + 14  # 0.06 s and 14 times 0.003 s are over 0.1 s


@pytest.mark.parametrize("method", ["fedfan_three_sizes", "fedcross_three_sizes", "heterofl", "adaptivefl"])
def test_models_of_several_widths_are_measured_each(method):
    assert Pace()(read([*SMALL, f"method={method}", "devices=three_sizes", "rounds=1000"]))[0] > 0


def test_jobs_with_other_widths_are_measured_apart():
    line = ["-m", *SMALL, "method=fedcross", "method.widths=[1.0],[0.4]"]
    assert [cell.runs for cell in cells(checked_plan(line))] == [1, 1]


def test_rows_of_the_same_names_say_in_what_they_differ(capsys):
    line = ["-m", *SMALL, "method=fedcross,fedavg", "method.widths=[1.0,0.5],[1.0]"]
    show(checked_plan(line), lambda jobs: [(1.0, 1.0)] * len(jobs))
    rows = [[cell.strip() for cell in row.split("│")[1:]] for row in capsys.readouterr().out.splitlines() if "│" in row]
    assert [row[4] for row in rows[:3]] == ["method.widths=[1.0,0.5]", "method.widths=[1.0]", ""]


def test_a_row_names_the_choice_and_not_its_settings_and_nonzero_for_values_of_equal_speed(capsys):
    line = ["-m", *SMALL, "method=fedsam", "method.rho=0,0.1,0.2", "partition=iid,dirichlet"]
    found = checked_plan(line)
    show(found, lambda jobs: [(1.0, 1.0)] * len(jobs))
    rows = [[cell.strip() for cell in row.split("│")[1:]] for row in capsys.readouterr().out.splitlines() if "│" in row]
    numbers = "method.rho=0.0", "method.rho=nonzero"
    wanted = {f"partition={name} {number}" for name in ("iid", "dirichlet") for number in numbers}
    assert {row[4] for row in rows[:4]} == wanted


def test_done_runs_cost_nothing(monkeypatch, tmp_path, capsys):
    sweep = ["-m", *SMALL, "engine.workers=1", "method=fedavg", "rounds=2", f"hydra.sweep.dir={tmp_path / 'all'}"]
    assert call(monkeypatch, tmp_path, *sweep, "seed=1") == 0
    (cell,) = cells(checked_plan([*sweep, "seed=1,2"]))
    assert (cell.runs, cell.done, cell.rounds) == (2, 1, 2)
    assert call(monkeypatch, tmp_path, *sweep, "seed=1", "--cost") == 0
    assert "total" in capsys.readouterr().out


def test_a_run_that_goes_on_counts_what_is_done_and_is_refused_as_without_cost(monkeypatch, tmp_path, capsys):
    run = [*SMALL, "engine.workers=1", "method=fedcross"]
    assert call(monkeypatch, tmp_path, *run, "rounds=3", "output=one") == 0
    (cell,) = cells(checked_plan(["resume=one", "rounds=30"]))
    assert (cell.runs, cell.done, cell.rounds, cell.evaluations) == (1, 0, 27, 27)
    (cell,) = cells(checked_plan(["resume=one", "rounds=30", "stop_at=10"]))
    assert (cell.done, cell.rounds, cell.evaluations) == (0, 7, 7)
    (cell,) = cells(checked_plan(["resume=one"]))
    assert (cell.done, cell.rounds) == (1, 0)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    capsys.readouterr()
    for line in (["resume=one", "method.alpha=0.5"], ["resume=one", "rounds=2"], [*run, "output=one"]):
        told = [(call(monkeypatch, tmp_path, *line, *cost), capsys.readouterr()) for cost in ([], ["--cost"])]
        assert [code for code, _ in told] == [2, 2]
        without, cost = (one.err.splitlines() for _, one in told)
        assert cost
        assert without[-len(cost) :] == cost
        assert not told[1][1].out
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_the_command_measures_and_runs_nothing_else(monkeypatch, tmp_path, capsys):
    line = [*SMALL, "engine.workers=1", "rounds=1000", "method=fedavg", "--cost"]
    assert call(monkeypatch, tmp_path, *line) == 0
    told = capsys.readouterr().out
    row = next(line for line in told.splitlines() if line.startswith("│ fedavg"))
    cellsof = [cell.strip() for cell in row.strip("│").split("│")]
    assert cellsof[:7] == ["fedavg", "digits", "mlp", "local", "1", "0", "1000"]
    seconds, evaluation, hours = map(float, cellsof[7:])
    assert seconds > 0
    assert hours == pytest.approx((1000 * seconds + 1000 * evaluation) / 3600, rel=0.02)
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_the_table_adds_up(capsys):
    found = plan(["-m"], [*SMALL, "method=fedavg,fedcross", "rounds=36", "evaluate_every=36"])
    show(found, lambda jobs: [(100.0, 0.0)] * len(jobs))
    # Twice 36 rounds of 100 s: an hour each.
    total = next(line for line in capsys.readouterr().out.splitlines() if "total" in line)
    assert [cell.strip() for cell in total.strip("│").split("│")][4:] == ["2", "0", "72", "", "", "2"]


def test_a_row_whose_data_are_missing_has_its_reason_and_the_others_their_numbers(monkeypatch, tmp_path, capsys):
    missing = ["task=digits,cifar10_fedct", "method=fedavg", f"data_root={tmp_path}", "rounds=36"]
    done = []

    def steps(trial):
        done.append(trial)
        return Seconds(step=100.0, example=0.0, visit=0.0, server=0.0, tested=0.0)

    monkeypatch.setattr("fedcross.server.pace.measured", steps)
    show(plan(["-m"], [*SMALL, *missing, "evaluate_every=36"]))
    told = capsys.readouterr().out
    rows = [[cell.strip() for cell in row.strip("│").split("│")] for row in told.splitlines() if row.startswith("│")]
    table = {row[1]: row[7:] for row in rows if row[0] == "fedavg"}
    assert table["cifar10"] == ["-", "-", "-"]
    assert float(table["digits"][0]) >= 100
    assert next(row for row in rows if row[0] == "total")[-1] == table["digits"][-1]
    assert "without 1 of 2 rows" in told
    assert str(tmp_path) in told.split("rows.")[1]
    assert len(done) == 1


def test_data_that_are_missing_altogether_are_an_error_before_the_first_step(monkeypatch, tmp_path):
    monkeypatch.setattr("fedcross.server.pace.measured", lambda trial: pytest.fail("measured"))
    with pytest.raises(DataError, match=str(tmp_path)):
        show(plan(["-m"], ["task=cifar10_fedct", "method=fedavg", f"data_root={tmp_path}", "seed=1,2"]))


def test_a_cell_without_rounds_has_no_hours():
    assert Cell(("a", "b", "c", "d"), [], {}).hours((5.0, 1.0)) == 0
