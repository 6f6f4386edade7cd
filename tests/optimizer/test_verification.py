"""A frontier's claims hold when it is read again, and every change to them is detected."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pipelines import one_f_one_b, scaled, synthetic_profile

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.errors import FrontierError, ProfileError
from perseus_ds.optimizer import bounds, optimize
from perseus_ds.optimizer.bounds import Verifier, verify
from perseus_ds.optimizer.problem import problem_for

POWER_W = 80.0


@pytest.fixture(scope="module")
def profile():
    return synthetic_profile(2, load_s={0: 0.004}, tail_s={0: 0.03, 1: 0.02})


@pytest.fixture(scope="module")
def written(profile, tmp_path_factory):
    """A folder with frontier.json and certificates.npz."""
    folder = tmp_path_factory.mktemp("frontier")
    frontier = optimize(one_f_one_b(2, 4), profile, blocking_power_w=POWER_W, plans=12, certificates=True)
    frontier.save(folder)
    return folder


def check(folder, profile):
    return verify(Frontier.load(folder), Certificates.load(folder), profile)


def test_what_was_written_is_verified(written, profile):
    frontier = Frontier.load(written)
    assert len(frontier.plans) > 3
    assert check(written, profile) == max(plan.gap for plan in frontier.plans)


def test_bounds_by_ranks_that_a_first_look_leaves_out_are_verified(tmp_path, monkeypatch):
    """As in frontiers of version 0.1.0, which bounded more ranks together."""
    schedule, profile = one_f_one_b(4, 6), synthetic_profile(4)
    frontier = optimize(schedule, profile, blocking_power_w=POWER_W, plans=6, certificates=True)
    frontier.save(tmp_path)
    certificates = Certificates.load(tmp_path)
    monkeypatch.setattr(bounds, "_WORTH_IT", 1.0)
    verifier = Verifier(problem_for(schedule, profile, blocking_power_w=POWER_W))
    at_first_j = [
        verifier.bound_j(plan.time_s, *certificates.flow_w(number)) for number, plan in enumerate(frontier.plans)
    ]
    assert any(first_j < plan.lower_bound_j for first_j, plan in zip(at_first_j, frontier.plans, strict=True))
    assert check(tmp_path, profile) == max(plan.gap for plan in frontier.plans)


def test_a_new_frontier_removes_the_certificates_of_the_old_one(written, tmp_path):
    shutil.copytree(written, tmp_path / "copy")
    Frontier.load(written).save(tmp_path / "copy")
    with pytest.raises(FrontierError, match=r"certificates\.npz: no such file.*--certificates"):
        Certificates.load(tmp_path / "copy")


def edit_plan(number, **changes):
    def edit(raw):
        for key, factor in changes.items():
            raw["plans"][number][key] *= factor

    return edit


def other_clock(raw):
    clocks = raw["plans"][2]["clocks_mhz"][1]
    clocks[3] = 900 if clocks[3] != 900 else 1410


def unmeasured_clock(raw):
    raw["plans"][2]["clocks_mhz"][1][3] = 901


def no_bound(raw):
    raw["plans"][1]["lower_bound_j"] = None


def one_plan_less(raw):
    del raw["plans"][1]


def other_instruction(raw):
    raw["instructions"][0][0][2] = 1


def other_power(raw):
    raw["provenance"]["blocking_power_w"] += 1


def other_row(raw):
    raw["instruction_times_s"][0][3] *= 1.01


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (edit_plan(1, lower_bound_j=1 + 1e-9), r"^plan 1: the frontier states a lower bound of"),
        (edit_plan(3, energy_j=1 - 1e-6), r"^plan 3 uses .* J, by the profile's rows"),
        (edit_plan(0, time_s=1 - 1e-6), r"^plan 0 takes .* s, by the profile's rows"),
        (other_clock, r"^plan 2 (takes|uses)"),
        (unmeasured_clock, r"^plan 2: The profile has no row for stage 1, .*, 901 MHz"),
        (no_bound, r"^plan 1 states no lower bound"),
        (one_plan_less, r"plans, but certificates for"),
        (other_instruction, r"instructions are not those of the certificates' schedule"),
        (other_power, r"^the baseline uses"),
        (other_row, r"^instruction_times_s: stage 0, .*, 900 MHz takes"),
        (lambda raw: raw.update(t_min_s=raw["t_min_s"] * 0.99), r"^T_min is"),
    ],
)
def test_a_changed_frontier_is_found(written, profile, tmp_path, edit, message):
    raw = json.loads((written / "frontier.json").read_text())
    edit(raw)
    (tmp_path / "frontier.json").write_text(json.dumps(raw))
    with pytest.raises(FrontierError, match=message):
        verify(Frontier.load(tmp_path), Certificates.load(written), profile)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, edge_flow_w=c.edge_flow_w * 1.05),
        lambda c: replace(c, edge_flow_w=c.edge_flow_w * 0.0),
        lambda c: replace(c, edge_flow_w=-c.edge_flow_w),
        lambda c: replace(c, edge_flow_w=c.edge_flow_w * np.nan),
        lambda c: replace(c, source_flow_w=c.source_flow_w * 2),
        lambda c: replace(c, share=1 - c.share),
    ],
)
def test_a_changed_flow_proves_less(written, profile, change):
    with pytest.raises(FrontierError, match=r"^plan \d+: "):
        verify(Frontier.load(written), change(Certificates.load(written)), profile)


def test_flows_of_another_width_are_refused_before_they_are_mixed(written, profile, monkeypatch):
    monkeypatch.setattr(Certificates, "flow_w", None)
    loaded = Certificates.load(written)
    with pytest.raises(FrontierError, match=r"^the certificates' flows have \d+ edges and \d+ nodes, the schedule"):
        verify(Frontier.load(written), replace(loaded, edge_flow_w=loaded.edge_flow_w[:, 1:]), profile)


def test_another_profile_is_found(written, profile):
    with pytest.raises(FrontierError, match="T_min is"):
        check(written, scaled(profile, time=1.001))
    with pytest.raises(FrontierError, match="the baseline uses"):
        check(written, scaled(profile, energy=1.001))
    with pytest.raises(ProfileError, match="has 2 stages, the profile 1"):
        check(written, synthetic_profile(1))


def test_a_schedule_with_fewer_constraints_proves_other_bounds(written, profile):
    frontier, certificates = Frontier.load(written), Certificates.load(written)
    without = replace(
        certificates.schedule,
        ranks=tuple(
            tuple(op for op in stream if type(op).__name__ != "Exchange") for stream in certificates.schedule.ranks
        ),
    )
    with pytest.raises(FrontierError, match="T_min is"):
        verify(frontier, replace(certificates, schedule=without), profile)


def rewritten(written, tmp_path, **changes):
    with np.load(written / "certificates.npz") as arrays:
        values = {**arrays, **changes}
    path = tmp_path / "certificates.npz"
    np.savez_compressed(path, **values)
    return path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": np.int64(9)}, "schema_version is 9, this perseus-ds reads 1"),
        ({"extra": np.zeros(1)}, "expected .*, found"),
        ({"share": np.zeros(3, dtype=">f8")}, "share: expected float64 in 1 dimensions, found >f8 of shape"),
        ({"share": np.array([2.0] * 12)}, "do not belong together|share: expected fractions"),
        ({"mixed": np.full((1, 2), 99)}, "do not belong together"),
        ({"schedule": np.frombuffer(b"{}", dtype=np.uint8)}, r"schedule\.name: missing"),
        ({"schedule": np.frombuffer(b"[" * 10**6, dtype=np.uint8)}, "recursion limit exceeded"),
        (
            {"schedule": np.frombuffer(b'{"name": "x", "micro_batches": 1, "ranks": [[]]}', dtype=np.uint8)},
            "no rank has an instruction",
        ),
    ],
)
def test_foreign_arrays_are_refused(written, tmp_path, changes, message):
    with pytest.raises(FrontierError, match=message):
        Certificates.load(rewritten(written, tmp_path, **changes))


def test_arrays_that_need_too_much_memory_are_not_unpacked(written, tmp_path, monkeypatch):
    monkeypatch.setattr("perseus_ds.artifacts.certificates._MOST_BYTES", 100_000)
    with pytest.raises(FrontierError, match=r"\d+ bytes of arrays, at most 100000 are read"):
        Certificates.load(rewritten(written, tmp_path, share=np.zeros(13_000)))


class Touches:
    """Creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickled_objects_are_never_loaded(written, tmp_path):
    touched = tmp_path / "touched"
    path = rewritten(written, tmp_path, share=np.array([Touches(touched)], dtype=object))
    with pytest.raises(FrontierError, match=r"certificates\.npz: .*allow_pickle"):
        Certificates.load(path)
    assert not touched.exists()
