"""The BERT and Wide-ResNet examples on real ranks, with simulated GPUs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
QUICK = ["model=tiny", "log_every=1", "perseus.device=simulated", "perseus.simulated.longest_instruction_s=0.03"]
QUICK_PROFILE = [
    "perseus.profile.sampling=stride",
    "perseus.profile.clock_stride=16",
    "perseus.profile.max_window_s=0.2",
]

pytestmark = pytest.mark.integration


def train(example, ranks, folder, *overrides):
    """Train and return the losses by step, and what Perseus recorded of each iteration."""
    script = str(ROOT / "examples" / example / "train.py")
    done = subprocess.run(
        [*TORCHRUN, str(ranks), script, *QUICK, f"perseus.output_dir={folder}", *overrides],
        cwd=folder.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder.parent / "cache")},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-4000:]
    records = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    losses = [float(loss) for loss in re.findall(r"steps: \d+ loss: ([\d.]+)", output)]
    return losses, [r for r in records if "energy_j" in r]


@pytest.mark.parametrize(("example", "fall"), [("bert", 1.0), ("wide_resnet", 0.5)])
def test_loss_falls_on_two_stages(example, fall, tmp_path):
    losses, records = train(example, 2, tmp_path / "run", "perseus.mode=observe", "steps=16", "micro_batches=4")
    assert len(losses) == 16
    assert losses[-1] < losses[0] - fall
    assert all(record["simulated"] and record["energy_j"] > 0 for record in records)
