"""Clients that patch DeepSpeed train bit for bit as without Perseus, while profiled and under a plan."""

import json
from pathlib import Path

import pytest
from job import SIMULATED, assert_untouched, block_in, run_jobs
from run_log import events, records

SCRIPTS = Path(__file__).parent / "scripts"
RANKS = {"megatron_deepspeed": 4}
# Patches called by the training of each client.
PATCHES = {
    "diffusion_pipe": {"steps", "hook", "step", "reduce_grads"},
    "megatron_deepspeed": {"optimizer_step"},
    "qlora_pipe": {"load", "reference", "forward", "train_batch"},
}
# Commands known to the client only.
UNKNOWN = {"qlora_pipe": {"LoadIntoTwoBuffers", "ReferenceForwardPass"}}

pytestmark = [pytest.mark.integration, pytest.mark.extended]


@pytest.mark.parametrize("client", PATCHES)
def test_a_client_trains_the_same(tmp_path, client):
    jobs = {"auto": {"until": ["run", 5], "perseus": block_in(tmp_path, "auto", simulated=SIMULATED)}, "without": {}}
    for of_rank in run_jobs(tmp_path, RANKS.get(client, 2), SCRIPTS / f"{client}.py", jobs):
        assert_untouched(of_rank)
        ours, plain = of_rank["auto"], of_rank["without"]
        assert set(ours["calls"]) == set(plain["calls"]) == PATCHES[client]
        assert "run" in ours["phases"]
    assert events(records(tmp_path / "auto"), "failure") == []
    unknown = UNKNOWN.get(client, set())
    rows = (tmp_path / "auto" / "profile.csv").read_text().splitlines()[1:]
    assert {row.split(",")[1] for row in rows} >= {"forward", "backward"}
    profile = json.loads((tmp_path / "auto" / "profile.json").read_text())
    assert {other["command"] for other in profile.get("others") or []} == unknown
    assert "could not put back" not in (tmp_path / "output.log").read_text()
