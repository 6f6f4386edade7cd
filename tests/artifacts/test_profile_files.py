import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import synthetic_profile

from perseus_ds.artifacts.profile import Measurement, ProfileInfo, RowQuality, StageProfile, TransferDuration
from perseus_ds.errors import ProfileError
from perseus_ds.pipeline.instruction import Kind

HEADER = "stage,instruction,frequency,time,energy\n"
GOOD = HEADER + "0,forward,1200,0.06,20\n0,forward,1400,0.05,22\n0,backward,1200,0.12,40\n0,backward,1400,0.1,44\n"


@pytest.fixture
def csv_file(tmp_path):
    def write(text, name="profile.csv"):
        path = tmp_path / name
        path.write_text(text, errors="surrogateescape")
        return path

    return write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "column 'stage' is missing.*an empty file"),
        (HEADER, "no rows"),
        (GOOD.replace("0.05", "nan"), "line 3: time: expected a finite number, got 'nan'"),
        (GOOD + "0,forward,1400,0.07,22\n", "Two measurements disagree for stage 0, forward, 1400 MHz"),
        ("\x00\udcff", r"not a profile\.csv, because it is not UTF-8"),
        (GOOD[:-7], "line 5: time is empty; the file may be truncated"),
        (GOOD.replace("0.05", "0,05"), "line 3: more cells than columns"),
        (HEADER + "0,forward,1400,0.05,22000\n", "line 2: .* in millijoules: divide the column energy by 1000"),
        (HEADER + "0,forward,1400,50,22\n", "in milliseconds: divide the column time by 1000"),
        (HEADER + "0,forward,1400,0.05,0.022\n", "in kilojoules: multiply the column energy by 1000"),
        (HEADER + "0,forward,1400,1e-9,22\n", "a GPU draws 5 to 5000 W. Give times in seconds, and energies in joules"),
        (HEADER + "0,forward,1400,1500,660000\n", "takes 1500 s. Times are probably in milliseconds, and energies in"),
        (HEADER + "0,forward,1400000,0.05,22\n", "got '1400000'. Clocks are probably in kHz: .* are 1400 MHz"),
        (HEADER + "0,forward,1.4,0.05,22\n", "Clocks are probably in GHz: 1.4 GHz are 1400 MHz"),
    ],
)
def test_bad_rows_name_file_line_and_column_and_values_the_likely_unit(csv_file, text, message):
    with pytest.raises(ProfileError, match=rf"profile\.csv.*{message}"):
        StageProfile.load(csv_file(text))


def test_stages_that_are_numbered_from_1_are_said_to_be(csv_file):
    profile = StageProfile.load(csv_file(GOOD.replace("\n0,", "\n1,")))
    with pytest.raises(ProfileError, match=r"stages 1 to 1 and no stage 0: .* Subtract 1 from the column stage"):
        profile.options(0, Kind.FORWARD)


def test_a_spreadsheets_byte_order_mark_is_no_column_and_equal_rows_are_one(csv_file):
    profile = StageProfile.load(csv_file("\ufeff" + GOOD + "0,forward,1400,0.05,22\n"))
    assert len(profile.measurements) == 4
    assert profile.options(0, Kind.FORWARD).clock_mhz.tolist() == [1200, 1400]
    assert profile.at_highest_clock(0, Kind.BACKWARD) == Measurement(0, Kind.BACKWARD, 1400, 0.1, 44)


def test_meraks_ranks_are_combined_to_the_slowest_time_and_the_mean_energy(csv_file):
    lines = ["rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy"]
    for rank, slower_s in enumerate((0.0, 0.01, 0.0, 0.0)):
        where = f"{rank},{rank // 2},0,{rank % 2},0,forward"
        lines += [f"{where},1200,{0.06 + slower_s},{20 + rank}", f"{where},1400,{0.05 + slower_s},{30 + rank}"]
    first, second = StageProfile.load(csv_file("\n".join(lines) + "\n")).measurements
    assert first == Measurement(0, Kind.FORWARD, 1200, 0.06 + 0.01, 21.5)
    assert second == Measurement(0, Kind.FORWARD, 1400, 0.05 + 0.01, 31.5)


def ragged(slow_mhz, fast_mhz):
    """Return Merak's rows of a stage on two ranks, the first 40 % slower, and of a second stage."""
    lines = ["rank,dp_rank,pp_rank,tp_rank,stage,instruction,frequency,time,energy"]
    for rank, stage, slower, clocks in ((0, 0, 1.4, slow_mhz), (1, 0, 1.0, fast_mhz), (2, 1, 1.0, fast_mhz)):
        for kind in ("forward", "backward"):
            lines += [f"{rank},{rank},{stage},0,{stage},{kind},{mhz},{slower * 28 / mhz},10" for mhz in clocks]
    return "\n".join(lines) + "\n"


def test_a_stage_has_only_clocks_that_all_its_ranks_have(csv_file, caplog):
    profile = StageProfile.load(csv_file(ragged((1280, 1400), (920, 1280, 1400))))
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        assert profile.options(0, kind).clock_mhz.tolist() == [1280, 1400]
        assert profile.options(0, kind).time_s == pytest.approx([1.4 * 28 / 1280, 1.4 * 28 / 1400])
        assert profile.options(1, kind).clock_mhz.tolist() == [920, 1280, 1400]
    (record,) = caplog.records
    assert "stage 0: 920 MHz, missing on rank 0, dp_rank 0, tp_rank 0 (backward, forward)" in record.getMessage()


def test_ranks_without_a_clock_in_common_are_an_error(csv_file):
    with pytest.raises(ProfileError, match=r"profile\.csv: stage 0, backward: no clock .* rank 0.* lacks 920 MHz"):
        StageProfile.load(csv_file(ragged((1280, 1400), (920, 1000))))
    without = ragged((1280, 1400), (1280, 1400)).replace("1,1,0,0,0,backward", "1,1,0,0,0,forward")
    with pytest.raises(ProfileError, match=r"stage 0, backward: no clock .* rank 1.* lacks 1280 MHz"):
        StageProfile.load(csv_file(without))


def test_a_missing_stage_or_kind_is_named(csv_file):
    profile = StageProfile.load(csv_file(GOOD + "2,forward,1200,0.06,20\n2,forward,1400,0.05,22\n"))
    assert profile.num_stages == 3
    with pytest.raises(ProfileError, match="no forward rows for stage 1"):
        profile.options(1, Kind.FORWARD)
    with pytest.raises(ProfileError, match="no backward rows for stage 2"):
        profile.at_highest_clock(2, Kind.BACKWARD)
    with pytest.raises(ProfileError, match="no row for stage 0, forward, 1300 MHz"):
        profile.at(0, Kind.FORWARD, 1300)


def test_saving_and_loading_changes_nothing_and_rows_that_the_json_lists_must_exist(tmp_path):
    rows = synthetic_profile(2).measurements
    info = ProfileInfo(
        simulated=True,
        gpu="A100 (simulated)",
        blocking_power_w=83.64,
        tail_s={0: 0.01, 1: 0.02},
        transfers=[TransferDuration(payload="grad", source=1, target=0, time_s=0.002)],
        rows=[RowQuality(stage=m.stage, kind=m.kind, clock_mhz=m.clock_mhz, samples=5) for m in rows],
    )
    path = tmp_path / "deep" / "profile.csv"
    StageProfile(rows, info).save(path)
    loaded = StageProfile.load(path.parent)
    assert (loaded.measurements, loaded.info) == (rows, info)
    assert loaded.info.fixed_durations.transfer_s == {("grad", 1, 0): 0.002}
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(ProfileError, match=r"profile\.csv: no row for stage 1, forward, .* which profile\.json lists"):
        StageProfile.load(path)


points = st.lists(
    st.tuples(st.floats(0.01, 1.0), st.floats(1.0, 100.0)), min_size=1, max_size=12, unique_by=lambda point: point[0]
)


@settings(deadline=None, max_examples=60)
@given(points, st.floats(0, 50))
def test_pareto_options_are_those_none_is_as_fast_and_as_frugal_as(values, power_w):
    rows = [Measurement(0, Kind.FORWARD, 1000 + n, t, e) for n, (t, e) in enumerate(values)]
    options = StageProfile(rows).options(0, Kind.FORWARD)
    cost = options.effective_energy_j(power_w)
    better = [
        any(
            (options.time_s[j] <= t and cost[j] < c) or (options.time_s[j] < t and cost[j] <= c)
            for j in range(len(cost))
        )
        for t, c in zip(options.time_s, cost, strict=True)
    ]
    pareto = options.pareto(power_w)
    assert set(pareto.clock_mhz.tolist()) == set(options.clock_mhz[~np.array(better)].tolist())
    assert (np.diff(pareto.time_s) > 0).all()
    assert (np.diff(pareto.effective_energy_j(power_w)) < 0).all()
