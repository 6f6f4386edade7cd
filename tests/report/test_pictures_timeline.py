"""Pictures of frontiers, timelines and profiles."""

from itertools import product

import pytest
from live_records import started, write
from run_folders import MICRO_BATCHES

from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Transfer
from perseus_ds.report.pictures import frontier_picture
from perseus_ds.report.timeline import timeline


def test_every_instruction_has_its_bar_at_its_clock_and_a_transfer_one_on_either_side(job):
    plan = job.frontier.plans[-1]
    drawn = timeline(job.dag, job.profile, plan)
    assert drawn.time_s == pytest.approx(plan.time_s)
    assert {bar.work: bar.clock_mhz for bar in drawn.bars if bar.clock_mhz is not None} == plan.clock_of_mhz
    transfers = [(bar.work.source, bar.work.micro_batch, bar.rank) for bar in drawn.bars if type(bar.work) is Transfer]
    assert sorted(transfers) == [*product((0, 1), range(MICRO_BATCHES), (0, 1))]
    critical = {bar.work: bar.end_s - bar.start_s for bar in drawn.bars if bar.critical}
    assert sum(critical.values()) == pytest.approx(drawn.time_s)
    assert Instruction(0, Kind.FORWARD, 0) in critical


def test_a_picture_of_simulated_gpus_says_so(tmp_path, job):
    frontier_picture(job.frontier, tmp_path / "frontier.svg")
    title = "<!-- Energy against iteration time: 3 stages, 4 micro-batches, simulated A100-SXM -->"
    assert title in (tmp_path / "frontier.svg").read_text(encoding="utf-8")


def test_a_run_to_draw_must_have_iterations_at_default_clocks_or_under_a_plan(tmp_path, job, capsys):
    job.profile.save(tmp_path / "profile.csv")
    job.frontier.save(tmp_path)
    write(tmp_path / "empty", [started(mode="observe")])
    assert main(["plot", f"{tmp_path}", "--runs", f"{tmp_path / 'empty'}"]) == 2
    assert "no iterations at default clocks" in capsys.readouterr().err
