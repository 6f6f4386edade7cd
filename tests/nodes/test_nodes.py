"""Jobs on several simulated nodes, with real DeepSpeed ranks, stub drivers and separate disks."""

import json
import os
import shlex
import subprocess
import sys

import pytest
import run_log
from frontiers import save_random_plan
from job import DEEPSPEED, SCRIPT, SIMULATED, run
from nodes.cluster import CannotBeMadeError, Cluster
from run_log import JOB_GIVE_UP_S, wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]
PORT = 29500
STORE_PORT = 29400
BATCH, WIDTH = 512, 16
PLAIN_STEPS = 400
"""More steps than a job takes here before it is stopped."""
# Lost nodes send nothing, so a job's collectives wait until their timeout.
TIMEOUT_S = 60
SSH = """#!/bin/bash
# A remote shell: runs a command on a node.
while [[ "$1" == -* ]]; do shift 2; done
host=$1; shift
eval "entry=($(cat "{folder}/$host.entry"))"
exec "${{entry[@]}}" bash -c "$*"
"""
PDSH = """#!/bin/bash
# Runs a command on some nodes by a remote shell, %n being the node's number.
while [[ "$1" == -* ]]; do
    case "$1" in -w) hosts=$2; shift 2 ;; -f) shift 2 ;; *) shift ;; esac
done
number=0
for host in ${{hosts//,/ }}; do line="$*"; ssh "$host" "${{line//%n/$number}}" & number=$((number + 1)); done
for job in $(jobs -p); do wait "$job" || exit 1; done
"""


@pytest.fixture
def make_cluster(tmp_path, stub_library):
    """A function that creates a number of nodes with a shared folder."""
    made = []

    def make(count):
        try:
            made.append(Cluster(tmp_path, stub_library, count))
        except CannotBeMadeError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        return made[0]

    yield make
    for cluster in made:
        cluster.close()


def put(node, ranks, **job):
    """Put the files of a job that runs under a plan on a node's own disk."""
    disk = node.variables["DISK"]
    block = {"device": "nvml", "output_dir": f"{disk}/perseus", "simulated": SIMULATED}
    block |= {"mode": "run", "frontier": f"{disk}/frontier"}
    default = {"stages": ranks, "micro_batches": 4, "work": [3] * 4, "steps": 1_000_000, "timeout_s": TIMEOUT_S}
    settings = {**default, **job, "perseus": block}
    (node.disk / "job.json").write_text(json.dumps(settings))


def put_plan(node, ranks):
    save_random_plan(node.disk / "frontier", ranks=ranks, simulated=False)


def torchrun(node, *options):
    """Start torch's launcher on a node, with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", *options]
    return node.start(*command, str(SCRIPT), node.variables["DISK"])


def finished(process):
    output, _ = process.communicate(timeout=run_log.JOB_GIVE_UP_S)
    assert process.returncode == 0, output[-4000:]
    return output


def start_under_a_plan(cluster, **job):
    """Start a job on all nodes with a plan that is only on the disk of rank 0's node."""
    ranks = len(cluster.nodes)
    put_plan(cluster.nodes[0], ranks)
    for node in cluster.nodes:
        put(node, ranks, **job)
    options = [f"--nnodes={ranks}", "--master_addr=node-1", f"--master_port={PORT}"]
    return [torchrun(node, *options, f"--node_rank={rank}") for rank, node in enumerate(cluster.nodes)]


def stop(cluster, started):
    """Request a job to end, and wait until its launchers have ended."""
    (cluster.nodes[0].disk / "stop").touch()
    for process in started:
        finished(process)


def iterations(node, *phases):
    return run_log.iterations(run_log.records(node.disk / "perseus"), *phases)


def report(node, rank):
    return json.loads((node.disk / f"rank{rank}.json").read_text())


def wait_for(condition, what, processes):
    """Wait until a condition holds, within the time of a whole job. Fails if a launcher has ended."""
    wait_until(lambda: condition() or any(p.poll() is not None for p in processes), what, JOB_GIVE_UP_S)
    for process in processes:
        if process.poll() is not None:
            pytest.fail(f"a launcher has ended: {process.communicate()[0][-4000:]}")


def assert_restored(node):
    wait_until(lambda: node.gpus.locked_clocks_mhz() == [0], f"the default clock on {node.name}")
    assert any(node.gpus.gpus[0].changes_mhz()), "no clock was locked, so nothing was tested"


def assert_ran_as_on_one_node(cluster, folder, **job):
    """Losses equal those of the same job on one node without Perseus. Only rank 0's node has records."""
    nodes = cluster.nodes
    plain = run(folder, len(nodes), steps=PLAIN_STEPS, **job)
    for rank, node in enumerate(nodes):
        losses = report(node, rank)["losses"]
        assert repr(losses) == repr(plain.ranks[rank]["losses"][: len(losses)])
        assert (node.disk / "perseus").exists() == (rank == 0)
        assert_restored(node)
    assert len(iterations(nodes[0])) == len(losses)


def test_a_job_of_four_nodes_by_torchrun(make_cluster, tmp_path):
    """No disk is shared, and the plan is only on rank 0's node. Each node has its own agent."""
    cluster = make_cluster(4)
    first = cluster.nodes[0]
    started = start_under_a_plan(cluster)
    for node in cluster.nodes:
        wait_for(lambda node=node: any(node.gpus.locked_clocks_mhz()), f"a locked clock on {node.name}", started)
        wait_until(lambda node=node: len(node.agents()) == 1, f"one agent on {node.name}")
    wait_for(lambda: len(iterations(first, "run")) >= 3, "iterations under the plan", started)
    stop(cluster, started)
    assert_ran_as_on_one_node(cluster, tmp_path / "plain")


def test_a_job_by_hostfile_over_slow_links(make_cluster, tmp_path):
    """DeepSpeed's launcher on a login node starts ranks through a remote shell. Links carry 1 MB/s."""
    cluster = make_cluster(2)
    first = cluster.nodes[0]
    cluster.make_slow(megabits_per_s=8)
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("".join(f"{node.name} slots=1\n" for node in cluster.nodes))
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("ssh", SSH), ("pdsh", PDSH)):
        (commands / name).write_text(text.format(folder=tmp_path))
        (commands / name).chmod(0o755)
    put_plan(first, 2)
    for node in cluster.nodes:
        (tmp_path / f"{node.name}.entry").write_text(shlex.join(node.entry))
        put(node, 2, buckets=[BATCH])
    launcher = [sys.executable, DEEPSPEED, "--no_local_rank", "--hostfile", str(hostfile), "--master_port", str(PORT)]
    process = subprocess.Popen(
        [*launcher, str(SCRIPT), str(cluster.disk)],
        cwd=cluster.disk,
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for(lambda: len(iterations(first, "run")) >= 5, "iterations under the plan", [process])
    for node in cluster.nodes:
        wait_until(lambda node=node: len(node.agents()) == 1, f"one agent on {node.name}")
    stop(cluster, [process])
    assert_ran_as_on_one_node(cluster, tmp_path / "plain", buckets=[BATCH])
    # A link passes the first bytes of the activations of four micro-batches at full speed.
    least_s = (4 * BATCH * WIDTH * 4 - cluster.BURST_BYTES) / 1e6
    assert all(record["time_s"] > least_s for record in iterations(first))


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_job_goes_on_with_another_node_when_one_is_lost(make_cluster, tmp_path, lost_rank):
    """A node fails suddenly, and torch's launchers restart the job from its checkpoint with a spare node."""
    cluster = make_cluster(3)
    first, *_, spare = cluster.nodes
    lost, survivor = cluster.nodes[lost_rank], cluster.nodes[1 - lost_rank]
    checkpoint = cluster.folder / "checkpoint"
    for node in cluster.nodes:
        # Otherwise a launcher that remains that of rank 0 does not send rank 0's address to a new one (torch 2.13).
        node.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        put_plan(node, 2)
        put(node, 2, keep_every=5, resume_from=str(checkpoint))
    store = ["--rdzv-backend=c10d", f"--rdzv-endpoint={survivor.name}:{STORE_PORT}", "--rdzv-id=job"]
    elastic = ["--nnodes=2", "--max-restarts=3", *store, "--rdzv-conf=keep_alive_interval=2,keep_alive_max_attempt=8"]
    before = [torchrun(node, *elastic) for node in (lost, survivor)]
    wait_for(lambda: len(iterations(first, "run")) >= 12, "steps under the plan", before)
    starts = len(run_log.events(run_log.records(survivor.disk / "perseus"), "start"))
    cluster.lose(lost)
    saved = int((checkpoint / "latest").read_text().removeprefix("global_step"))
    before[0].communicate()
    started = [before[1], torchrun(spare, *elastic)]

    def has_gone_on():
        """Return True if the restarted job trains. Its rank 0 is on the survivor."""
        records = run_log.records(survivor.disk / "perseus")
        begins = [number for number, record in enumerate(records) if record.get("event") == "start"]
        return len(begins) > starts and len(run_log.iterations(records[begins[-1] :], "run")) >= 4

    wait_for(has_gone_on, "steps of the restarted job under the plan", started)
    for node in (survivor, spare):
        wait_until(lambda node=node: len(node.agents()) == 1, f"an agent on {node.name}")
    (survivor.disk / "stop").touch()
    for process in started:
        finished(process)
    losses = report(survivor, 0)["losses"]
    plain = run(tmp_path / "plain", 2, steps=PLAIN_STEPS, keep_every=1000, resume_from="nowhere")
    assert repr(losses) == repr(plain.ranks[0]["losses"][saved : saved + len(losses)])
    for node in (survivor, spare):
        assert_restored(node)
