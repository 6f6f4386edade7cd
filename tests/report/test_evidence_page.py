"""Results of GPU checks, as a page and in a terminal."""

import json

import pytest
from run_folders import make_evidence

from perseus_ds.cli.main import main


@pytest.fixture
def folder(tmp_path):
    make_evidence().save(tmp_path)
    return tmp_path


def test_a_page_shows_every_check_with_its_figures_and_limits(folder, capsys):
    assert main(["report", str(folder)]) == 0
    page = (folder / "evidence.html").read_text()
    assert "Simulated GPUs" in page, "evidence of a stand-in is labelled"
    for shown in ("1 of 2 checks passed", "lateness: 3.5 ms (at most 2 ms)", "at most 2 ms", "torch 2.13.0"):
        assert shown in page
    assert "not made: Graphs" in page
    assert "&lt;b&gt;as measured" in page
    assert "how fast a GPU follows a lock" in page, "the page states what it cannot show"
    printed = capsys.readouterr().out
    assert "1 of 2 checks passed on simulated A100." in printed
    assert "FAILED: Requests: lateness: 3.5 ms (at most 2 ms)" in printed
    assert "SIMULATED" in printed


def test_damaged_evidence_is_an_error_that_names_the_key(folder, capsys):
    raw = json.loads((folder / "evidence.json").read_text())
    raw["checks"][0]["outcome"] = "perhaps"
    (folder / "evidence.json").write_text(json.dumps(raw))
    assert main(["report", str(folder)]) == 2
    assert "evidence.json: checks.0.outcome: expected 'passed' or 'failed', got 'perhaps'" in capsys.readouterr().err
