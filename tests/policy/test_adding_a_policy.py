"""The changes in docs/add-a-policy.md, applied to a copy of the package, add a policy."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/add-a-policy.md").read_text()
DECIDE = """
import json, sys
from datetime import datetime, timezone
import perseus_ds
from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.pipeline.instruction import Instruction, Kind
from perseus_ds.policy.decisions import Situation, decide
from perseus_ds.config import parse_block

INSTRUCTIONS = ((Instruction(0, Kind.FORWARD, 0),),)
PLANS = tuple(FrequencyPlan(INSTRUCTIONS, ((1400 - 10 * i,),), 1.0 + 0.01 * i, 100.0 - i) for i in range(30))
PROVENANCE = Provenance(schedule="1f1b", micro_batches=1, stages=1, blocking_power_w=1, solver="none")
FRONTIER = Frontier(PLANS, 1.0, PLANS[0], PROVENANCE)
assert perseus_ds.__file__.startswith(sys.argv[1])
decisions = []
for block in json.loads(sys.argv[2]):
    decision = decide(parse_block(block).policy, FRONTIER, Situation(step=0, now=datetime.now(timezone.utc)))
    decisions.append([decision.plan, decision.problem])
print(json.dumps(decisions))
"""


def apply(diff: str, folder: Path) -> None:
    """Apply a diff of one hunk without line numbers."""
    header, *lines = diff.splitlines()
    path = folder / header.removeprefix("--- ")
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    after = "\n".join(line[1:] for line in lines if not line.startswith("-"))
    text = path.read_text()
    assert text.count(before) == 1, f"{path.name} does not contain once: {before}"
    path.write_text(text.replace(before, after))


@pytest.fixture
def decide(tmp_path):
    shutil.copytree(ROOT / "perseus_ds", tmp_path / "perseus_ds", ignore=shutil.ignore_patterns("__pycache__"))
    for diff in re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL):
        apply(diff, tmp_path)

    def run(*blocks):
        command = [sys.executable, "-c", DECIDE, str(tmp_path), json.dumps(blocks)]
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(
            command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=600, check=True
        )
        return json.loads(done.stdout)

    return run


def test_the_policy_of_the_page_can_be_configured_and_decides(decide):
    example = json.loads(re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)[1])
    (found, problem), (slowest, unmet) = decide(example, {"policy": {"name": "saving", "fraction": 0.5}})
    assert (found, problem) == (10, "")
    assert slowest == 29
    assert "no plan saves 50%" in unmet
