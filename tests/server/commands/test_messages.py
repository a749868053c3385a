"""What the command says to wrong input: exact texts, one or two lines each, with what, the value seen and what to do.

The first 28 are what newcomers typed; the others are ours. ``{tmp}`` stands for the folder of the test.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedcross.core.causes import PAGE
from fedcross.core.paths import page
from fedcross.server.check import COMMANDS
from fedcross.server.commands.main import SUBCOMMANDS
from tests.support.command import main

MESSAGES: list[tuple[list[str], str]] = [
    (
        ["method.alpha=2"],
        "method.alpha=2: must be from 0.5 to 1.",
    ),
    (
        ["method.alpha=0.3"],
        "method.alpha=0.3: must be from 0.5 to 1.",
    ),
    (
        ["method.alpha=high"],
        "method.alpha=high: must be a number, or a schedule such as {schedule: linear, start: 0.5, end: "
        "0.99, rounds: 100}.",
    ),
    (
        ["clients_per_round=500"],
        "clients_per_round=500: the federation has 20 clients (partition.clients). Lower one or raise the other.",
    ),
    (
        ["method=fedcros"],
        "method=fedcros: there is no such method. Did you mean 'fedcross'?",
    ),
    (
        ["metod=fedavg"],
        "metod: no such setting. Did you mean 'method'?",
    ),
    (
        ["train.lrr=1"],
        "train.lrr: no such setting. Did you mean 'train.lr'?",
    ),
    (
        ["task=mnist", "data_root=nowhere"],
        "MNIST: missing nowhere/MNIST/raw/train-images-idx3-ubyte, "
        "nowhere/MNIST/raw/train-labels-idx1-ubyte, nowhere/MNIST/raw/t10k-images-idx3-ubyte and 1 more. Put "
        "the four unpacked idx files into {tmp}/nowhere/MNIST/raw, or set task.download=true.",
    ),
    (
        ["partition.min_size=100"],
        "20 clients with at least 100 examples each need 2000, but there are 1438. Lower partition.clients "
        "or partition.min_size, or raise task.limit.",
    ),
    (
        ["resume=nowhere"],
        "resume=nowhere: no such run folder. Name the folder of a run.",
    ),
    (
        ["rounds=[1,"],
        "A setting cannot be read. Write NAME=VALUE without spaces, and quote a value with special "
        "characters: \"output='/tmp/a[1]'\". Hydra says: no viable alternative at input '[1,'.",
    ),
    (
        ["-m", "method=fedavg,fedcross", "method.alfa=0.9"],
        "method.alfa: nothing that this sweep chooses has this setting.",
    ),
    (
        ["-m", "method=fedavg,fedcros"],
        "method=fedcros: there is no such method. Did you mean 'fedcross'?",
    ),
    (
        ["--rounds=5"],
        "--rounds=5: a setting has no dashes. Write rounds=5. fedcross --help lists settings.",
    ),
    (
        ["--rounds", "5"],
        "--rounds 5: a setting has no dashes. Write rounds=5. fedcross --help lists settings.",
    ),
    (
        ["method=fedavg", "method.alpha=0.9"],
        "method.alpha=0.9: method=fedavg has no setting alpha. Leave it out. {settings} lists what there is.",
    ),
    (
        ["rounds"],
        "fedcross rounds: no such subcommand. Did you mean 'record'?\n"
        "To start a run, give its settings: fedcross method=fedcross task=digits",
    ),
    (
        ["=5"],
        "=5: a setting needs a name. Write NAME=VALUE, such as rounds=5.",
    ),
    (
        ["output=~/x"],
        "output=~/x: Hydra does not know ~. Write the whole path: output=/root/x.",
    ),
    (
        ["output=/tmp/a[1]"],
        "A setting cannot be read. Write NAME=VALUE without spaces, and quote a value with special "
        "characters: \"output='/tmp/a[1]'\". Hydra says: mismatched input '[' expecting <EOF>.",
    ),
    (
        ["seed=1,2"],
        "seed=1,2: several values are a sweep. Add -m, or use fedcross.sweep in Python.",
    ),
    (
        ["resume="],
        "resume=: no folder is named. Name the folder of a run.",
    ),
    (
        ["device=cuda:7"],
        "device=cuda:7: torch finds 0 usable GPUs on this machine. Choose device=auto or cpu, "
        "mend the driver, or set FEDCROSS_DEVICE=cpu if only this machine has none.",
    ),
    (
        ["device=cuda"],
        "device=cuda: torch finds 0 usable GPUs on this machine. Choose device=auto or cpu, "
        "mend the driver, or set FEDCROSS_DEVICE=cpu if only this machine has none.",
    ),
    (
        ["task=arrays", "task.file=x.csv"],
        "data/x.csv: task=arrays reads an .npz. For this file write task=table task.file=x.csv.",
    ),
    (
        ["engine.workers=abc"],
        "engine.workers=abc: must be auto or a whole number, 1 or more.",
    ),
    (
        ["rounds=true"],
        "rounds=true: must be a whole number, 1 or more.",
    ),
    (
        ["output=my", "run"],
        "run: not a setting. Write NAME=VALUE, such as rounds=5. If it belongs to the setting before it, "
        'quote both: "output=my run".',
    ),
    # of our own
    (
        ["device=tpu"],
        "device=tpu: must be written as auto, cpu, cuda, cuda:0 or mps.",
    ),
    (
        ["engine=remote"],
        "2 errors in the configuration:\n"
        "  - engine.address: this setting is required. Write engine.address=superlink.example.org:8000.\n"
        "  - engine.authority: this setting is required. Write engine.authority=authority/public/ca.crt.",
    ),
    (
        ["snapshots.rounds=3"],
        "snapshots.rounds=3: must be a list, with each entry a whole number, 1 or more. Write snapshots.rounds=[3].",
    ),
    (
        ["snapshots.rounds=[0]"],
        "snapshots.rounds.0=0: must be a whole number, 1 or more.",
    ),
    (
        ["train.bacth=3", "rounds=0", "train.lr=fast"],
        "3 errors in the configuration:\n"
        "  - train.bacth: no such setting. Did you mean 'train.batch'?\n"
        "  - rounds=0: must be a whole number, 1 or more.\n"
        "  - train.lr=fast: must be a number above 0.",
    ),
    (
        ["experiment=fedcross/nope"],
        "experiment=fedcross/nope: there is no such experiment. Did you mean 'fedcross/fig4_landscape'?",
    ),
    (
        ["-m", "rounds=1,2"],
        "rounds=1,2: runs that differ only in rounds would share one folder. Start a sweep for each value, "
        "each with its own hydra.sweep.dir=DIR.",
    ),
    (
        ["resume={tmp}", "output=other"],
        "resume={tmp}: this folder holds no run. Name the folder of a run.",
    ),
    (
        ["rounds=0"],
        "rounds=0: must be a whole number, 1 or more.",
    ),
    (
        ["rounds=2.5"],
        "rounds=2.5: must be a whole number, 1 or more.",
    ),
    (
        ["rounds=null"],
        "rounds=null: must be a whole number, 1 or more.",
    ),
    (
        ["seed=-1"],
        "seed=-1: must be a whole number, 0 or more.",
    ),
    (
        ["train.momentum=1"],
        "train.momentum=1: must be a number, 0 or more and below 1.",
    ),
    (
        ["train.precision=half"],
        "train.precision=half: must be float32, tf32 or bfloat16.",
    ),
    (
        ["defence.enabled=maybe"],
        "defence.enabled=maybe: must be true or false.",
    ),
    (
        ["compression.up=int4"],
        "compression.up=int4: must be float32, float16 or int8.",
    ),
    (
        ["method.selection=lowest"],
        "method.selection=lowest: must be in_order, highest_similarity, lowest_similarity, random or "
        "least_similar_derangement.",
    ),
    (
        ["+method.alfa=0.9"],
        "method.alfa: unknown setting. Did you mean 'alpha'?",
    ),
    (
        ["+train.foo.bar=1"],
        "train.foo: unknown setting. There are: base, base_sha256, batch, clip, deterministic, epochs, examples, "
        "lr, lr_decay, lr_min, momentum, only, precision, weight_decay.",
    ),
    (
        ["method.alpha={schedule: linear, start: low, end: 1, rounds: 5}"],
        "method.alpha.start=low: must be a number.",
    ),
    (
        ["method.alpha={schedule: cubic}"],
        "method.alpha={schedule: cubic}: must be a number, or a schedule such as {schedule: linear, start: "
        "0.5, end: 0.99, rounds: 100}.",
    ),
    (
        ["federation.min_clients=0"],
        "federation.min_clients=0: must be null or a whole number, 1 or more.",
    ),
    (
        ["partition.clients=0"],
        "partition.clients=0: must be a whole number, 1 or more.",
    ),
    (
        ["partition=dirichlit"],
        "partition=dirichlit: there is no such partition. Did you mean 'dirichlet'?",
    ),
    (
        ["task=table", "task.file=x.csv"],
        "{tmp}/data/x.csv: no such file. Set task.root to its folder and task.file to its name.",
    ),
    (
        ["task=table", "task.root={tmp}", "task.file=own.csv", "task.label=nope"],
        "{tmp}/own.csv: no column 'nope' (task.label). There are: a, label.",
    ),
    (
        ["task=text", "task.root={tmp}"],
        "{tmp}/data.txt: no such file. Set task.root to its folder and task.file to its name.",
    ),
    (
        ["task=folder", "task.root={tmp}/none"],
        "{tmp}/none: no such folder. Put pictures into {tmp}/none/CLASS/ or set task.root.",
    ),
    (
        ["partition=flwr_datasets", "partition.partitioner=Dirichlet"],
        "partition.partitioner=Dirichlet: Flower Datasets has no such partitioner. Did you mean "
        "'DirichletPartitioner'?",
    ),
    (
        ["partition=flwr_datasets", "partition.partitioner=DirichletPartitioner"],
        "partition.partitioner=DirichletPartitioner: it needs alpha. Write +partition.args.alpha=VALUE.",
    ),
    (
        ["partition=indices"],
        "partition.file: this setting is required. Write partition.file=VALUE.",
    ),
    (
        ["attack=scaling", "attack.clients=50"],
        "attack.clients=50: the federation has 20 clients. Lower it.",
    ),
    (
        ["model=vgg16_bn"],
        "model.name='vgg16_bn': images of shape (1, 8, 8) of task 'digits' are too small for its "
        "convolutions and pools (Given input size: (512x1x1). Calculated output size: (512x0x0). Output size "
        "is too small). Choose a smaller model.",
    ),
    (
        ["logger=nope"],
        "logger=nope: there is no such logger. Did you mean 'none'?",
    ),
    (
        ["checkpoint.keep=0"],
        "checkpoint.keep=0: must be a whole number, 1 or more.",
    ),
    (
        ["reprot", "x"],
        "fedcross reprot: no such subcommand. Did you mean 'report'?\n"
        "To start a run, give its settings: fedcross method=fedcross task=digits",
    ),
    (
        ["partition", "--plot", "x.xyz"],
        "fedcross partition: --plot x.xyz: a plot cannot be written as '.xyz'. Use .png, .pdf or .svg.",
    ),
    (
        ["partition", "--seeds", "0"],
        "fedcross partition: --seeds 0: give 1 or more.",
    ),
    (
        ["export", "nowhere"],
        "fedcross export: nowhere: no such run folder. Name the folder of a run.",
    ),
    (
        ["report", "nowhere"],
        "fedcross report: nowhere: no such folder. Give the output folder of a run or of a sweep.",
    ),
    (
        ["partition=natural"],
        "partition=natural: task digits has no users. Use femnist, shakespeare, sent140, arrays with users "
        "or a table with task.users.",
    ),
    (
        ["train=fast"],
        "train=fast: must be a group of settings.",
    ),
    (
        ["method.alpha=[0.9]"],
        "method.alpha=[0.9]: must be a number, or a schedule such as {schedule: linear, start: 0.5, end: "
        "0.99, rounds: 100}.",
    ),
    (
        ["~rounds"],
        "rounds: this setting is required.",
    ),
    (
        ["federation.enough_replies=0"],
        "federation.enough_replies=0: must be null or a whole number, 1 or more.",
    ),
    (
        ["engine.workers=0"],
        "engine.workers=0: must be auto or a whole number, 1 or more.",
    ),
    (
        ["task.mean=[0,0]"],
        "task.mean has 2 values and std 1: give one each per channel.",
    ),
    (
        ["task.limit=0"],
        "task.limit=0: must be null or a whole number, 1 or more.",
    ),
    (
        ["task.limit=100"],
        "20 clients with at least 10 examples each need 200, but there are 100. Lower partition.clients or "
        "partition.min_size, or raise task.limit.",
    ),
    (
        ["record=x"],
        "record=x: no such setting, but a subcommand. Write fedcross record x. fedcross record --help lists what it "
        "takes.",
    ),
    (
        ["-m", "seed=1,2", "verify=n"],
        "verify=n: no such setting, but a subcommand. Write fedcross record verify n. fedcross record verify --help "
        "lists what it takes.",
    ),
]


@pytest.mark.parametrize(("arguments", "told"), MESSAGES, ids=[" ".join(arguments) for arguments, _ in MESSAGES])
def test_wrong_input_is_told_in_these_words(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/root")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    Path("own.csv").write_text("a,label\n1,x\n2,y\n")
    assert main([argument.replace("{tmp}", str(tmp_path)) for argument in arguments]) == 2
    said, _, cause = capsys.readouterr().err.rstrip().partition("\nCause: ")
    assert said == told.replace("{tmp}", str(tmp_path)).replace("{settings}", page("reference/settings.md"))
    named = {"device": "no_gpu", "task": "data_missing"}.get(arguments[0].partition("=")[0], "no_checkpoint")
    assert not cause or cause == f"{named} ({PAGE})"
    assert [path.name for path in tmp_path.iterdir()] == ["own.csv"], "nothing is written before all is checked"


def test_every_subcommand_is_known_where_settings_are_checked():
    assert set(COMMANDS) == {*SUBCOMMANDS, "verify"}
    assert all(command.split()[0] in SUBCOMMANDS for command in COMMANDS.values())


def test_there_are_28_inputs_of_the_trial_and_30_of_our_own():
    assert len(MESSAGES) >= 28 + 30
