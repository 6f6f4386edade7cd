"""Where energies of a job are shown, it is said if they are those of whole modules."""

import json

import pytest
from live_records import auto_job, facts_at, started
from prometheus_client import generate_latest
from run_folders import write_auto_run

from perseus_ds.artifacts.frontier import Frontier
from perseus_ds.artifacts.profile import GpuSettings, StageProfile
from perseus_ds.cli.main import main
from perseus_ds.server.metrics import registry_of
from perseus_ds.server.recorder import Recorder

NOTES = {True: "energy of whole modules", None: "unknown: energy of GPUs or whole modules", False: ""}


def write(folder, job, whole_module):
    """Write the output folder of a job on GPUs with such energies."""
    write_auto_run(folder, job)
    settings = GpuSettings(power_limit_w=400.0, whole_module=whole_module)
    profile, frontier = StageProfile.load(folder / "profile.csv"), Frontier.load(folder / "frontier.json")
    profile.info.settings = frontier.provenance.settings = settings
    profile.save(folder / "profile.csv")
    frontier.save(folder)
    first, *others = (folder / "run.jsonl").read_text().splitlines()
    start = json.loads(first) | {"settings": settings.model_dump()}
    (folder / "run.jsonl").write_text("\n".join([json.dumps(start), *others]) + "\n")


@pytest.mark.parametrize(("whole_module", "note"), NOTES.items())
def test_every_command_that_shows_energies_says_whose_they_are(tmp_path, job, capsys, whole_module, note):
    write(tmp_path / "run", job, whole_module)
    for words in (
        ["watch", str(tmp_path / "run"), "--once"],
        ["report", str(tmp_path / "run")],
        ["compare", str(tmp_path / "run")],
        ["profile", "show", str(tmp_path / "run" / "profile.csv")],
        ["optimize", str(tmp_path / "run"), "--out", str(tmp_path / "plans"), "--plans", "4"],
    ):
        assert main(words) == 0
        shown = " ".join(capsys.readouterr().out.split())
        assert ("whole modules" in shown) is bool(note), words
        assert note in shown, words
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert (f"<span>{note}</span>" in page) is bool(note)


@pytest.mark.parametrize(("whole_module", "note"), NOTES.items())
def test_lines_and_metrics_of_a_job_say_whose_energies_they_are(tmp_path, whole_module, note):
    received = []
    Recorder(tmp_path, simulated=False, energy_note=note, send=received.append).say("step 1: 1.000 s, 80.00 J")
    assert received[-1].text == "perseus: step 1: 1.000 s, 80.00 J" + (f", {note}" if note else "")
    start = started().model_copy(update={"settings": GpuSettings(whole_module=whole_module)})
    facts = facts_at([start, *auto_job()[1:]], 0.0)
    lines = generate_latest(registry_of(lambda: facts)).decode().splitlines()
    energies = [line for line in lines if line.startswith("perseus_energy_joules_total")]
    assert energies
    assert all(f'energy_note="{note}"' in line for line in energies)
