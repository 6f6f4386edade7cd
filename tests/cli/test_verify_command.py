import json

import pytest
from pipelines import synthetic_profile


@pytest.fixture(autouse=True)
def profile(run):
    """A profile in the current folder."""
    synthetic_profile(2, blocking_power_w=80.0, micro_batches=4).save("profile.csv")


@pytest.fixture
def optimized(run):
    """Output of "optimize", which wrote a frontier with certificates to the folder "f"."""
    code, out, _ = run("optimize", "--profile", "profile.csv", "--out", "f", "--plans", "8", "--certificates")
    assert code == 0
    return out


def test_what_optimize_wrote_is_verified(run, optimized):
    assert "Written: f/certificates.npz" in optimized
    both = ["--frontier", "f/frontier.json", "--certificates", "f/certificates.npz"]
    for words in (["f"], ["f", "--schedule", "1f1b", "--profile", "profile.csv"], both):
        code, out, _ = run("verify", *words)
        assert code == 0
        assert "plans verified: time and energy of each follow from the profile's rows" in out


def test_a_claim_that_does_not_hold_names_the_plan(run, optimized, tmp_path):
    path = tmp_path / "f" / "frontier.json"
    raw = json.loads(path.read_text())
    raw["plans"][1]["lower_bound_j"] *= 1.001
    path.write_text(json.dumps(raw))
    code, _, err = run("verify", "f", "--profile", "profile.csv")
    assert code == 1
    assert err.startswith("perseus-ds verify: f: plan 1: the frontier states a lower bound of")


def test_a_schedule_other_than_the_users_is_named(run, optimized):
    code, _, err = run("verify", "f", "--profile", "profile.csv", "--schedule", "pipelines:GPipe")
    assert code == 1
    assert "its schedule is not that of --schedule pipelines:GPipe" in err


def test_certificates_are_written_on_request_only_and_missed_by_name(run):
    run("optimize", "--profile", "profile.csv", "--out", "f", "--plans", "8")
    code, _, err = run("verify", "f", "--profile", "profile.csv")
    assert code == 2
    assert (
        'f/certificates.npz: no such file; it contains the proofs of the lower bounds. Run "perseus-ds optimize"' in err
    )


def test_lowtime_has_no_certificates(run):
    code, _, err = run("optimize", "--profile", "profile.csv", "--out", "f", "--solver", "lowtime", "--certificates")
    assert code == 2
    assert "only the exact solver proves bounds" in err
