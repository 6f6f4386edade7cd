import pytest
from pipelines import synthetic_profile

from perseus_ds.artifacts.frontier import ScheduleTable


@pytest.fixture(autouse=True)
def profile(run):
    """A profile in the folder "p"."""
    profile = synthetic_profile(2, simulated=True, gpu="A100 (simulated)", blocking_power_w=80.0, micro_batches=4)
    profile.save("p/profile.csv")


def test_every_schedule_of_torch_is_compared_with_its_assumptions(run, tmp_path):
    names = ["gpipe", "1f1b", "interleaved", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev"]
    code, out, _ = run("schedules", "p", "--schedules", *names, "--plans", "4", "--weight-share", "0.4")
    assert code == 0
    table = ScheduleTable.model_validate_json((tmp_path / "p" / "schedules.json").read_text())
    assert [one.name for one in table.schedules] == names
    assert [one.stages for one in table.schedules] == [2, 2, 4, 4, 4, 4, 4]
    assert table.simulated is True
    assert (tmp_path / "p" / "schedules.png").read_bytes().startswith(b"\x89PNG")
    lines = out.splitlines()
    for name in names:
        assert any(line.startswith(f"{name} ") for line in lines)
    assert "zbv: each stage is cut into 2 equal chunks" in out
    assert "40% of a backward's time and energy" in out
    assert "SIMULATED: no GPU was measured" in out


def test_deepspeeds_schedules_and_several_micro_batches(run, tmp_path):
    names = ["deepspeed_1f1b", "deepspeed_dualpipev"]
    words = ["--ranks", "2", "--micro-batches", "4", "8", "--plans", "4", "--out", "x"]
    code, out, _ = run("schedules", "p/profile.csv", "--schedules", *names, *words)
    assert code == 0
    table = ScheduleTable.model_validate_json((tmp_path / "x" / "schedules.json").read_text())
    assert [(one.stages, one.micro_batches) for one in table.schedules] == [(2, 4), (2, 8), (4, 4), (4, 8)]
    assert "Written: x/schedules.json and schedules.png" in out


def test_an_unknown_schedule_gets_a_suggestion(run):
    code, _, err = run("schedules", "p", "--schedules", "1f1b", "zvb")
    assert code == 2
    assert "no schedule is called 'zvb'; did you mean 'zbv'?" in err


def test_numbers_that_a_schedule_does_not_allow_are_named(run):
    code, _, err = run("schedules", "p", "--schedules", "interleaved", "--micro-batches", "5")
    assert code == 2
    assert "5 micro-batches" in err
    code, _, err = run("schedules", "p", "--weight-share", "1")
    assert code == 2
    assert "--weight-share: expected a number above 0 and below 1, got 1." in err
