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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda raw, plan: plan.update(lower_bound_j=plan["lower_bound_j"] * (1 + 1e-9)), "plan 1: the frontier"),
        (lambda raw, plan: plan.update(lower_bound_j=None), "plan 1 states no lower bound"),
        (lambda raw, plan: plan.update(energy_j=plan["energy_j"] * (1 - 1e-6)), "plan 1 uses .* J, by the"),
        (lambda raw, plan: plan.update(time_s=plan["time_s"] * (1 - 1e-6)), "plan 1 takes .* s, by the"),
        (lambda raw, plan: plan["clocks_mhz"][1].__setitem__(3, 901), "plan 1: The profile has no row for .*, 901 MHz"),
        (lambda raw, plan: raw["plans"].remove(plan), r"\d+ plans, but certificates for \d+"),
        (lambda raw, plan: raw["instructions"][0][0].__setitem__(2, 1), "the frontier's instructions are not those of"),
        (lambda raw, plan: raw["provenance"].update(blocking_power_w=POWER_W + 1), "the baseline uses"),
        (lambda raw, plan: raw["instruction_times_s"][0].__setitem__(3, 9.0), "instruction_times_s: stage 0, .* 900"),
        (lambda raw, plan: raw.update(t_min_s=raw["t_min_s"] * 0.99), "T_min is"),
    ],
)
def test_a_changed_frontier_is_found(written, profile, tmp_path, edit, message):
    raw = json.loads((written / "frontier.json").read_text())
    edit(raw, raw["plans"][1])
    (tmp_path / "frontier.json").write_text(json.dumps(raw))
    with pytest.raises(FrontierError, match=f"^{message}"):
        verify(Frontier.load(tmp_path), Certificates.load(written), profile)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: replace(c, edge_flow_w=c.edge_flow_w * 1.05),
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
    with pytest.raises(ProfileError, match="has 2 stages, the profile 1"):
        check(written, synthetic_profile(1))


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
        ({"share": np.zeros(3, dtype=">f8")}, "share: expected float64 in 1 dimensions, found >f8 of shape"),
        ({"mixed": np.full((1, 2), 99)}, "do not belong together"),
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
