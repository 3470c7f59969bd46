"""The records of a run handed out to its processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

from eval.benchmarks.base import Item, Sample
from eval.config import make_config
from eval.engine import make_variants
from eval.processes import Processes
from eval.session import UNITS_PER_PROCESS, Session

ROOT = Path(__file__).parents[2]
TAKER = """
import json, sys, time
from pathlib import Path
from eval.processes import Processes
folder, processes = Path(sys.argv[1]), Processes.current()

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.005)

taken = []
for number_of_turn, count in enumerate((6, 0, 9)):
    mine = []
    for number in processes.hand_out(count):
        mine.append(number)
        if processes.rank:
            (folder / f"slow one has a number of {number_of_turn}").touch()
            wait_for(f"fast one has ended {number_of_turn}")
        else:
            wait_for(f"slow one has a number of {number_of_turn}")
    if not processes.rank:
        (folder / f"fast one has ended {number_of_turn}").touch()
    taken.append(mine)
    processes.wait()
(folder / f"{processes.rank}.json").write_text(json.dumps(taken))
"""
AGREEING = """
import sys, time
from pathlib import Path
from eval.errors import EvalError
from eval.processes import Processes
folder, processes = Path(sys.argv[1]), Processes.current()

with processes.agreed():
    if processes.rank:
        time.sleep(0.5)
        (folder / "looked").touch()
(folder / f"{processes.rank} went on").write_text(str((folder / "looked").exists()))
try:
    with processes.agreed():
        if processes.rank:
            raise EvalError("one has no room")
except EvalError as error:
    (folder / f"{processes.rank} raised").write_text(str(error))
"""


def launch(script: str, folder: Path, *arguments: str) -> None:
    """Run a script in two processes, with the folder as its first argument."""
    file = folder / "script.py"
    file.write_text(script)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            "2",
            file,
            folder,
            *arguments,
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr


def test_one_process_takes_everything_in_order() -> None:
    assert list(Processes().hand_out(4)) == [0, 1, 2, 3]
    assert list(Processes().hand_out(0)) == []


def test_each_number_goes_to_one_process_and_the_faster_takes_what_is_left(tmp_path: Path) -> None:
    launch(TAKER, tmp_path)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    for mine, others, count in zip(first, second, (6, 0, 9), strict=True):
        assert sorted(mine + others) == list(range(count))
        assert mine == sorted(mine)
    assert [len(mine) for mine in second] == [1, 0, 1]


def test_processes_go_on_together_and_an_error_of_one_is_that_of_all(tmp_path: Path) -> None:
    launch(AGREEING, tmp_path)
    for rank in (0, 1):
        assert (tmp_path / f"{rank} went on").read_text() == "True"
        assert (tmp_path / f"{rank} raised").read_text() == "one has no room"


LEAVING = """
import atexit, sys
from pathlib import Path
from torch.distributed import is_initialized
from eval.processes import Processes

def look(folder=Path(sys.argv[1])):
    (folder / f"{Processes.started().rank} at its end").write_text(str(is_initialized()))

atexit.register(look)  # what is registered first runs last
Processes.current().wait()
"""


def test_processes_leave_their_group_before_python_ends(tmp_path: Path) -> None:
    launch(LEAVING, tmp_path)
    for rank in (0, 1):
        assert (tmp_path / f"{rank} at its end").read_text() == "False"


TIMED = """
import json, sys, time
from pathlib import Path
import torch
from eval.config import make_config
from eval.engine import Engine
from eval.processes import Processes
from eval.runner import run
from hf_sparse_attn.cli.models import load_model
from tests.eval.test_run import Loaded
folder, model_dir = Path(sys.argv[1]), sys.argv[2]
out, processes = folder / "out", Processes.current()

def hand_out(self, count):
    yield from range(count)[1:] if self.rank else range(count)[:1]

def one_second_each(self, jobs):
    for number, (_, variants) in enumerate(jobs):
        for variant in variants:
            time.sleep(1)
            self.model_seconds += 1
            yield number, variant, {"prediction": f"of {processes.rank}", "prompt_tokens": 5, "error": None}

Processes.hand_out, Engine.run = hand_out, one_second_each
source = Loaded(*load_model(model_dir, torch.float32, "cpu"))
given = {"benchmark": "passkey", "lengths": [400], "method": ["quest"], "token_budget": [64], "limit": 2}
config = make_config({**given, "model": model_dir})
summaries = []
for lost in (None, "of 1", None):
    if processes.is_main and lost is not None:
        rows = out / "rows.jsonl"
        lines = rows.read_text().splitlines(keepends=True)
        lines.remove(next(line for line in lines if json.loads(line)["prediction"] == lost))
        rows.write_text("".join(lines))
        (out / "summary.json").write_text(json.dumps({**summaries[-1], "date": "long ago"}))
    processes.wait()
    summaries.append(run(config, out, source, processes))
if processes.is_main:
    (folder / "summaries.json").write_text(json.dumps(summaries))
"""


def test_the_times_of_a_run_are_those_of_all_its_processes(tmp_path: Path, model_dir: str) -> None:
    """The first process measures one of four records, and waits for the other."""
    launch(TIMED, tmp_path, model_dir)
    whole, resumed, finished = json.loads((tmp_path / "summaries.json").read_text())
    assert whole["rows"] == resumed["rows"] == finished["rows"] == 4
    assert [each["model_seconds"] for each in (whole, resumed, finished)] == [4, 5, 5]
    assert 0 < whole["harness_seconds"] < 1.5  # the first one waits for two seconds
    assert resumed["date"] != "long ago"
    assert resumed["harness_seconds"] > whole["harness_seconds"]
    for name in ("date", "harness_seconds"):
        assert finished[name] == resumed[name]


def units_of(world_size: int, steps: list[int], materials: list[str | None]) -> list[list[tuple[str, list[int]]]]:
    """Return ids and budgets of the units of work of items with so many new tokens."""
    config = make_config({"benchmark": "passkey", "model": "m", "method": ["quest"], "token_budget": [32, 64, 128]})
    items = [
        Item(f"task {count}", str(number), lambda count=count: Sample([1] * 100, [1], "a", count), material=material)
        for number, (count, material) in enumerate(zip(steps, materials, strict=True))
    ]
    variants = make_variants(config)
    session = Session(config, items, variants, None, None, Processes(0, world_size), {})  # type: ignore[arg-type]
    return [
        [(item.sample_id, [variant.token_budget or 0 for variant in own]) for item, own in unit]
        for unit in session._units([(item, variants) for item in items])
    ]


def test_one_process_keeps_an_items_variants_together() -> None:
    everything = [0, 32, 64, 128]
    assert units_of(1, [5, 50], [None, None]) == [[("0", everything)], [("1", everything)]]
    assert units_of(1, [5, 5, 5], ["book", "book", None]) == [
        [("0", everything), ("1", everything)],
        [("2", everything)],
    ]


def test_several_processes_part_few_items_and_take_the_longest_first() -> None:
    parted = units_of(2, [5, 50, 20], [None] * 3)
    assert [unit[0][0] for unit in parted] == ["1"] * 4 + ["2"] * 4 + ["0"] * 4  # 12 records, fewer than 16 units
    assert sorted(unit[0][1] for unit in parted if unit[0][0] == "1") == [[0], [32], [64], [128]]
    shared = units_of(2, [5, 5], ["book", "book"])
    assert [[name for name, _ in unit] for unit in shared] == [["0", "1"]] * 4
    many = units_of(2, [5] * 8 * UNITS_PER_PROCESS, [None] * 8 * UNITS_PER_PROCESS)
    assert all(len(unit[0][1]) == 4 for unit in many)
