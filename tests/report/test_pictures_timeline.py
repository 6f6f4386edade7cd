"""Pictures of frontiers, timelines and profiles."""

import pytest
from matplotlib.image import imread
from run_folders import MICRO_BATCHES, write_log

from perseus_ds.cli.main import main
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.pipeline.schedule import Transfer
from perseus_ds.report.jobs import MeasuredPoint
from perseus_ds.report.pictures import frontier_picture, timeline_picture
from perseus_ds.report.timeline import timeline


def test_every_instruction_has_its_bar_at_its_clock_and_a_transfer_one_on_either_side(job):
    plan = job.frontier.plans[-1]
    drawn = timeline(job.dag, job.profile, plan)
    assert drawn.time_s == pytest.approx(plan.time_s)
    shown = {bar.work: bar.clock_mhz for bar in drawn.bars if bar.clock_mhz is not None}
    assert shown == plan.clock_of_mhz
    transfers = [
        (bar.work.source, bar.work.micro_batch, bar.rank) for bar in drawn.bars if isinstance(bar.work, Transfer)
    ]
    assert sorted(transfers) == [
        (source, m, rank) for source in (0, 1) for m in range(MICRO_BATCHES) for rank in (0, 1)
    ]


def test_the_critical_path_fills_the_iteration(job):
    drawn = timeline(job.dag, job.profile, job.frontier.plans[0])
    critical = {bar.work: bar.end_s - bar.start_s for bar in drawn.bars if bar.critical}
    assert sum(critical.values()) == pytest.approx(drawn.time_s)
    assert Instruction(0, Kind.FORWARD, 0) in critical


def test_pictures_are_written_at_the_size_for_a_page(tmp_path, job):
    measured = [MeasuredPoint("default clocks", None, 1.0, 900.0, 10)]
    frontier_picture(job.frontier, tmp_path / "frontier.png", in_use=job.frontier.plans[0], measured=measured)
    before, after = (timeline(job.dag, job.profile, plan) for plan in (job.frontier.baseline, job.frontier.plans[-1]))
    timeline_picture(before, after, job.frontier.provenance, tmp_path / "t.png")
    for name in ("frontier.png", "t.png"):
        pixels = imread(tmp_path / name)
        assert pixels.shape[1] == 1800
        assert pixels[..., :3].std() > 0.05


def test_a_picture_of_simulated_gpus_says_so(tmp_path, job):
    frontier_picture(job.frontier, tmp_path / "frontier.svg")
    title = "<!-- Energy against iteration time: 3 stages, 4 micro-batches, simulated A100-SXM -->"
    assert title in (tmp_path / "frontier.svg").read_text(encoding="utf-8")


def test_plot_draws_from_files(tmp_path, job, capsys):
    job.profile.save(tmp_path / "profile.csv")
    job.frontier.save(tmp_path)
    arguments = ["--run", f"{tmp_path}", "--profile", f"{tmp_path}", "--out", f"{tmp_path / 'out'}"]
    assert main(["plot", *arguments]) == 0
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"frontier.png", "timeline.png"}
    assert main(["plot", *arguments, "--runs", f"{tmp_path / 'none'}"]) == 2
    assert "no such folder" in capsys.readouterr().err
    (tmp_path / "file").write_text("in the way")
    assert main(["plot", *arguments[:4], "--out", f"{tmp_path / 'file'}"]) == 2
    assert "cannot be a folder" in capsys.readouterr().err
    write_log(tmp_path / "empty", [{"event": "start", "mode": "observe"}])
    assert main(["plot", *arguments, "--runs", f"{tmp_path / 'empty'}"]) == 2
    assert "no iterations at default clocks" in capsys.readouterr().err
