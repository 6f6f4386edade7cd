from dataclasses import replace
from itertools import pairwise

import pytest
from matplotlib.image import imread
from run_folders import write_log

from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.profile import Measurement, ProfileInfo, StageProfile, TransferDuration
from perseus_ds.cli.main import main
from perseus_ds.optimizer.problem import Problem
from perseus_ds.pipeline.commands import read_schedule, schedule_class
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Transfer
from perseus_ds.report.jobs import MeasuredPoint
from perseus_ds.report.pictures import frontier_picture, timeline_picture
from perseus_ds.report.timeline import timeline

STAGES, MICRO_BATCHES, POWER_W = 3, 4, 80.0


@pytest.fixture(scope="module")
def schedule():
    return read_schedule(schedule_class("1f1b"), ranks=STAGES, micro_batches=MICRO_BATCHES)


@pytest.fixture(scope="module")
def profile():
    rows = [
        Measurement(stage, kind, clock, time_s := work * 1400 / clock, time_s * (100 + (clock / 200) ** 3))
        for stage in range(STAGES)
        for kind, work in ((Kind.FORWARD, 0.05 + 0.01 * stage), (Kind.BACKWARD, 0.1 + 0.02 * stage))
        for clock in (1000, 1200, 1400)
    ]
    info = ProfileInfo(
        simulated=True,
        gpu="simulated A100",
        blocking_power_w=POWER_W,
        tail_s=dict.fromkeys(range(STAGES), 0.02),
        transfers=[TransferDuration(payload="activation", source=0, target=1, time_s=0.003)],
    )
    return StageProfile(rows, info)


@pytest.fixture(scope="module")
def problem(schedule, profile):
    return Problem(Dag.build(schedule), profile, POWER_W)


@pytest.fixture(scope="module")
def frontier(schedule, problem):
    plans = (problem.plan(problem.fastest, lower_bound_j=1.0), problem.plan(problem.most_frugal, lower_bound_j=1.0))
    provenance = Provenance(
        schedule=schedule.name,
        micro_batches=MICRO_BATCHES,
        stages=STAGES,
        blocking_power_w=POWER_W,
        solver="exact",
        simulated=True,
        gpu="simulated A100",
    )
    return Frontier(plans, problem.t_min_s, problem.baseline(), provenance)


def test_a_timeline_ends_when_the_plan_says_and_a_rank_does_one_thing_at_a_time(problem, profile, frontier):
    for plan in frontier.plans:
        drawn = timeline(problem.dag, profile, plan)
        assert drawn.time_s == pytest.approx(plan.time_s)
        assert max(bar.end_s for bar in drawn.bars) == pytest.approx(plan.time_s)
        for rank in range(STAGES):
            bars = [bar for bar in drawn.bars if bar.rank == rank]
            assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(bars))


def test_every_instruction_has_its_bar_at_its_clock_and_a_transfer_one_on_either_side(problem, profile, frontier):
    plan = frontier.plans[-1]
    drawn = timeline(problem.dag, profile, plan)
    clocks = {
        instruction: clock
        for stream, row in zip(plan.instructions, plan.clocks_mhz, strict=True)
        for instruction, clock in zip(stream, row, strict=True)
    }
    shown = {bar.work: bar.clock_mhz for bar in drawn.bars if bar.clock_mhz is not None}
    assert shown == clocks
    transfers = [(bar.work.micro_batch, bar.rank) for bar in drawn.bars if isinstance(bar.work, Transfer)]
    assert sorted(transfers) == [(m, rank) for m in range(MICRO_BATCHES) for rank in (0, 1)]


def test_the_critical_path_fills_the_iteration(problem, profile, frontier):
    drawn = timeline(problem.dag, profile, frontier.plans[0])
    critical = {bar.work: bar.end_s - bar.start_s for bar in drawn.bars if bar.critical}
    assert sum(critical.values()) == pytest.approx(drawn.time_s)
    assert Instruction(0, Kind.FORWARD, 0) in critical


def test_pictures_are_written_at_the_size_for_a_page(tmp_path, problem, profile, frontier):
    measured = [MeasuredPoint("default clocks", None, 1.0, 900.0, 10)]
    frontier_picture(frontier, tmp_path / "frontier.png", in_use=frontier.plans[0], measured=measured)
    before = timeline(problem.dag, profile, frontier.baseline)
    timeline_picture(
        before, timeline(problem.dag, profile, frontier.plans[-1]), frontier.provenance, tmp_path / "t.png"
    )
    for name in ("frontier.png", "t.png"):
        pixels = imread(tmp_path / name)
        assert pixels.shape[1] == 1800
        assert pixels[..., :3].std() > 0.05


def test_a_picture_of_simulated_gpus_says_so(tmp_path, frontier):
    frontier_picture(frontier, tmp_path / "frontier.svg")
    assert "<!-- Energy against iteration time: 3 stages, 4 micro-batches, simulated A100 -->" in (
        tmp_path / "frontier.svg"
    ).read_text(encoding="utf-8")


def test_plot_draws_from_files(tmp_path, problem, profile, frontier, capsys):
    profile.save(tmp_path / "profile.csv")
    replace(frontier, schedule=problem.dag.schedule).save(tmp_path)
    arguments = [f"frontier={tmp_path}", f"profile={tmp_path}", f"out={tmp_path / 'out'}"]
    assert main(["plot", *arguments]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"frontier.png", "timeline.png"}
    assert main(["plot", *arguments, f"runs=[{tmp_path / 'none'}]"]) == 2
    assert "no such file" in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way")
    assert main(["plot", *arguments[:2], f"out={tmp_path / 'file'}"]) == 2
    assert "cannot be a folder" in capsys.readouterr().err
    write_log(tmp_path / "empty", [{"event": "start", "mode": "observe"}])
    assert main(["plot", *arguments, f"runs=[{tmp_path / 'empty'}]"]) == 2
    assert "no iterations at default clocks" in capsys.readouterr().err
