"""Two stages on one GPU with gloo, which transfers through the host's memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpu_checks.checks import named, place_of
from gpu_checks.results import Results

_RANKS = 2
_RANK = """
import sys
from gpu_checks.stage_checks import train_one_rank
train_one_rank(*sys.argv[1:])
"""


def stages(machine: Any, results: Results) -> None:
    """Losses and weights of two stages on one GPU have the same bits with and without Perseus."""
    with tempfile.TemporaryDirectory() as folder:
        found = {"profile": _train(machine, Path(folder), "profile", machine.most_iterations)}
        iterations = found["profile"][0]["iterations"]
        for mode in ("observe", "plain"):
            found[mode] = _train(machine, Path(folder), mode, iterations)
    for mode in ("observe", "profile"):
        for rank in range(_RANKS):
            same = found[mode][rank]["bits"] == found["plain"][rank]["bits"]
            results.add_fact(f"{mode}: stage {rank} has the same bits", same)
        results.add(f"{mode}: iterations in phase observe", found[mode][0]["observed"], at_least=1)
    transfers_s = found["profile"][0]["transfers_s"]
    results.add("transfers between the stages, measured", len(transfers_s), at_least=2)
    results.add("longest of them", max(transfers_s, default=0.0) * 1e3, "ms")


def _train(machine: Any, parent: Path, mode: str, iterations: int) -> list[dict[str, Any]]:
    """Train in a mode, or ``plain``, for some iterations or until there is a profile."""
    folder = parent / mode
    folder.mkdir()
    place = {"WORLD_SIZE": str(_RANKS), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(_RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(folder), mode, str(iterations), place_of(type(machine))]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, *arguments],
            env={**os.environ, **place, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    try:
        printed = [rank.communicate()[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, printed, strict=True):
        if rank.returncode:
            raise AssertionError(f"{mode}: a rank failed: {text[-1500:]}")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(_RANKS)]


def train_one_rank(folder: str, mode: str, iterations: str, place: str) -> None:
    """Train as one rank of the job, and write its report."""
    import deepspeed
    import torch
    from gpu_checks.training import Setup, batches, bits_of, block_of, engine_of

    from perseus_ds.artifacts.profile import StageProfile

    machine = named(place)()
    rank = int(os.environ["RANK"])
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_RANKS)
    deepspeed.init_distributed("gloo", dist_init_required=False)
    transfer_through_host()
    output = Path(folder) / "perseus"
    block = None if mode == "plain" else {**block_of(machine, mode, Path(folder)), "output_dir": str(output)}
    losses, phases = [], []
    with engine_of(machine, Setup(), block, machine.stage_size, stages=_RANKS) as engine:
        data = batches(machine, Setup(), machine.stage_size)
        while len(losses) < int(iterations) and not (mode == "profile" and phases.count("observe") == 2):
            phases.append("" if block is None else engine.perseus.phase)
            losses.append(repr(engine.train_batch(data).item()))
        bits = bits_of(engine, machine, losses)
    profile = StageProfile.load(output / "profile.csv") if mode == "profile" and rank == 0 else None
    found = {
        "bits": {name: repr(value) for name, value in bits.items()},
        "iterations": len(losses),
        "observed": phases.count("observe"),
        "transfers_s": [transfer.time_s for transfer in profile.info.transfers] if profile else [],
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def transfer_through_host() -> None:
    """Make all sends and receives use the host's memory, since gloo cannot send from a GPU.

    DeepSpeed's engine and the measurement of blocking power look these functions up at each use.
    """
    import torch.distributed as dist
    from torch import Tensor, empty

    send, receive = dist.send, dist.recv

    def send_from_host(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        return send(tensor.detach().cpu(), *arguments, **named)

    def receive_on_host(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        on_host = empty(tensor.shape, dtype=tensor.dtype)
        source = receive(on_host, *arguments, **named)
        tensor.data.copy_(on_host)
        return source

    dist.send, dist.recv = send_from_host, receive_on_host  # type: ignore[assignment]
