"""``perseus-ds profile``."""

from dataclasses import replace
from pathlib import Path

import pytest
from pipelines import synthetic_profile

from perseus_ds.artifacts.profile import StageProfile


@pytest.fixture(autouse=True)
def original(run):
    """A profile in the folder "p"."""
    synthetic_profile(2, simulated=True, blocking_power_w=80.0, micro_batches=3).save("p/profile.csv")
    return StageProfile.load("p")


def test_show_prints_every_row_and_draws_a_picture(run, original):
    code, out, _ = run("profile", "show", "--profile", "p", "--out", "pictures/p.png")
    assert code == 0
    assert sum(line.strip()[:1].isdigit() for line in out.splitlines()) == len(original.measurements)
    assert "SIMULATED" in out
    assert Path("pictures/p.png").read_bytes()[:4] == b"\x89PNG"


def test_compare_prints_by_how_much_rows_differ(run, original):
    slower = [replace(m, time_s=1.1 * m.time_s) for m in original.measurements if m.stage == 0]
    StageProfile(slower, original.info).save("q/profile.csv")
    code, out, _ = run("profile", "compare", "p", "q")
    assert code == 0
    assert out.count("+10.00%") == 4
    assert "only in p" in out


def test_validate_distinguishes_usable_profiles_from_others(run):
    code, out, _ = run("profile", "validate", "--profile", "p")
    assert code == 0
    assert "Plans can be computed" in out
    code, _, err = run("profile", "validate", "--profile", "p", "--blocking-power-w", "5000")
    assert code == 1
    assert "do not exceed the blocking power of 5000.0 W" in err


def test_merge_combines_stages_and_refuses_another_gpu(run, original):
    for stage in (0, 1):
        rows = [m for m in original.measurements if m.stage == stage]
        StageProfile(rows, original.info.model_copy(update={"gpu": "one"})).save(f"s{stage}/profile.csv")
    assert run("profile", "merge", "s0", "s1", "--out", "m")[0] == 0
    assert StageProfile.load("m").measurements == original.measurements
    StageProfile(rows, original.info.model_copy(update={"gpu": "another"})).save("x/profile.csv")
    code, _, err = run("profile", "merge", "s0", "x", "--out", "z")
    assert code == 2
    assert "gpu is 'another'" in err


def test_convert_reads_the_rows_of_several_ranks_of_merak(run):
    lines = ["rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy"]
    for tp in (0, 1):
        for kind in ("forward", "backward"):
            lines += [f"{tp},0,0,{tp},0,{kind},{clock},{0.1 + 0.01 * tp},{20 + 2 * tp}" for clock in (1000, 1200)]
    Path("merak.csv").write_text("\n".join(lines) + "\n")
    code, _, _ = run("profile", "convert", "--profile", "merak.csv", "--out", "c", "--blocking-power-w", "70")
    assert code == 0
    found = StageProfile.load("c")
    assert {(m.time_s, m.energy_j) for m in found.measurements} == {(0.11, 21.0)}
    assert (found.info.blocking_power_w, found.info.stages) == (70.0, 1)
