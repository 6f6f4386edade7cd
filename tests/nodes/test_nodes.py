"""Jobs of two and four nodes: real DeepSpeed ranks in network namespaces, each node with a stub driver and disk."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run_log
from frontiers import save_random_plan
from job import DEEPSPEED, SCRIPT, SIMULATED
from nodes.cluster import CannotBeMadeError, Cluster
from run_log import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.extended]
PORT = 29500
STORE_PORT = 29400
BATCH, WIDTH = 512, 16
PLAIN_STEPS = 400
"""More than a job here does before it is told to stop."""
# Nodes that are lost say nothing, so a job's collectives wait for as long as they may.
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
    """A function that makes so many nodes, and has all of them see a checkpoint folder."""
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
    """Put a job's files on a node's own disk."""
    disk = node.variables["DISK"]
    block = {"device": "nvml", "output_dir": f"{disk}/perseus", "simulated": SIMULATED, **job.pop("perseus", {})}
    settings = {"stages": ranks, "micro_batches": 4, "work": [3] * 4, "timeout_s": TIMEOUT_S, **job, "perseus": block}
    (node.disk / "job.json").write_text(json.dumps(settings))


def put_plan(node, ranks):
    save_random_plan(node.disk / "frontier", ranks=ranks, simulated=False)


def under_a_plan(node):
    return {"mode": "run", "frontier": f"{node.variables['DISK']}/frontier"}


def torchrun(node, *options):
    """Start torch's launcher on a node, with one rank."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "1", *options]
    return node.start(*command, str(SCRIPT), node.variables["DISK"])


def start_all(cluster):
    """Start torch's launcher on every node, each of which knows its number."""
    options = [f"--nnodes={len(cluster.nodes)}", "--master_addr=node-1", f"--master_port={PORT}"]
    return [torchrun(node, *options, f"--node_rank={rank}") for rank, node in enumerate(cluster.nodes)]


def finished(process):
    output, _ = process.communicate(timeout=run_log.GIVE_UP_S)
    assert process.returncode == 0, output[-4000:]
    return output


def iterations(node, *phases):
    return run_log.iterations(run_log.records(node.disk / "perseus"), *phases)


def report(node, rank):
    return json.loads((node.disk / f"rank{rank}.json").read_text())


def wait_for(condition, what, processes):
    """Wait until something is so, but not if a launcher has ended."""
    wait_until(lambda: condition() or any(p.poll() is not None for p in processes), what)
    for process in processes:
        if process.poll() is not None:
            pytest.fail(f"a launcher has ended: {process.communicate()[0][-4000:]}")


def assert_restored(node):
    wait_until(lambda: node.gpus.locked_clocks_mhz() == [0], f"the default clock on {node.name}")
    assert any(node.gpus.gpus[0].changes_mhz()), "no clock was ever locked, so nothing was tested"


def assert_ran_as_on_one_node(cluster, plain_runs, **job):
    """Losses are those of the same job on one node without Perseus; rank 0's node alone has records."""
    nodes = cluster.nodes
    plain = plain_runs.run(len(nodes), steps=PLAIN_STEPS, **job)
    for rank, node in enumerate(nodes):
        losses = report(node, rank)["losses"]
        assert repr(losses) == repr(plain.ranks[rank]["losses"][: len(losses)])
        assert (node.disk / "perseus").exists() == (rank == 0)
        assert_restored(node)
    assert len(iterations(nodes[0])) == len(losses)


@pytest.mark.parametrize("count", [2, 4])
def test_a_job_of_several_nodes_by_torchrun(make_cluster, plain_runs, count):
    """No disk is shared: the plan is on rank 0's node alone. Each node has a guardian of its own."""
    cluster = make_cluster(count)
    first = cluster.nodes[0]
    put_plan(first, count)
    for node in cluster.nodes:
        put(node, count, steps=1_000_000, perseus=under_a_plan(node))
    started = start_all(cluster)
    for node in cluster.nodes:
        wait_for(lambda node=node: any(node.gpus.locked_clocks_mhz()), f"a locked clock on {node.name}", started)
        assert len(node.guardians()) == 1
    wait_for(lambda: len(iterations(first, "run")) >= 3, "iterations under the plan", started)
    (first.disk / "stop").touch()
    for process in started:
        finished(process)
    assert_ran_as_on_one_node(cluster, plain_runs)


def test_a_job_by_hostfile_over_slow_links(make_cluster, plain_runs, tmp_path):
    """DeepSpeed's launcher, on a login node, reaches the nodes by a remote shell. Links carry 1 MB/s."""
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
        put(node, 2, steps=1_000_000, buckets=[BATCH], perseus=under_a_plan(node))
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
        assert len(node.guardians()) == 1
    (first.disk / "stop").touch()
    finished(process)
    assert_ran_as_on_one_node(cluster, plain_runs, buckets=[BATCH])
    # Of the activations of four micro-batches, a link lets some through at once.
    least_s = (4 * BATCH * WIDTH * 4 - cluster.BURST_BYTES) / 1e6
    assert all(record["time_s"] > least_s for record in iterations(first))


def test_clocks_of_nodes_that_are_minutes_apart(make_cluster, plain_runs, tmp_path):
    """Records tell the time by rank 0's node, also of what happened on another one, whose clock is seven minutes on."""
    cluster = make_cluster(2)
    first, second = cluster.nodes
    second.variables.update(LD_PRELOAD=str(date_offset(tmp_path)), DATE_OFFSET_S="420")
    assert int(second.start("date", "+%s").communicate()[0]) - time.time() == pytest.approx(420, abs=60)
    put_plan(first, 2)
    for node in cluster.nodes:
        put(node, 2, steps=1_000_000, perseus=under_a_plan(node))
    began = time.time()
    started = start_all(cluster)
    said = []

    def has_said():
        said[:] = run_log.events(run_log.records(first.disk / "perseus"), "failure")
        return said

    wait_for(lambda: any(second.gpus.gpus[0].changes_mhz()), "a locked clock on the second node", started)
    second.gpus.gpus[0].fail("set_locked", "no_permission")
    wait_for(has_said, "what rank 1's driver does not permit", started)
    (first.disk / "stop").touch()
    for process in started:
        finished(process)
    assert {event["rank"] for event in said} == {1}
    assert all(began < event["time"] < time.time() for event in said)
    assert_ran_as_on_one_node(cluster, plain_runs)


@pytest.mark.parametrize("lost_rank", [0, 1])
def test_a_job_goes_on_with_another_node_when_one_is_lost(make_cluster, plain_runs, lost_rank):
    """A node is gone at once; torch's launchers restart the job from its checkpoint with a spare one."""
    cluster = make_cluster(3)
    first, *_, spare = cluster.nodes
    lost, survivor = cluster.nodes[lost_rank], cluster.nodes[1 - lost_rank]
    checkpoint = cluster.folder / "checkpoint"
    for node in cluster.nodes:
        # Else a launcher that stays that of rank 0 does not tell a new one where rank 0 is (torch 2.13).
        node.variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        put_plan(node, 2)
        put(node, 2, steps=1_000_000, keep_every=5, resume_from=str(checkpoint), perseus=under_a_plan(node))
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
        """Rank 0 is on the survivor now, whichever it was before."""
        records = run_log.records(survivor.disk / "perseus")
        begins = [number for number, record in enumerate(records) if record.get("event") == "start"]
        return len(begins) > starts and len(run_log.iterations(records[begins[-1] :], "run")) >= 4

    wait_for(has_gone_on, "steps of the restarted job under the plan", started)
    for node in (survivor, spare):
        wait_until(lambda node=node: len(node.guardians()) == 1, f"a guardian on {node.name}")
    (survivor.disk / "stop").touch()
    for process in started:
        finished(process)
    losses = report(survivor, 0)["losses"]
    plain = plain_runs.run(2, steps=PLAIN_STEPS, keep_every=1000, resume_from="nowhere")
    assert repr(losses) == repr(plain.ranks[0]["losses"][saved : saved + len(losses)])
    for node in (survivor, spare):
        assert_restored(node)


def test_a_node_whose_job_cannot_go_on_gets_its_clocks_back(make_cluster):
    """Rank 0's node is lost with the connections between ranks, and nobody restarts the job."""
    cluster = make_cluster(2)
    first, second = cluster.nodes
    put_plan(first, 2)
    for node in cluster.nodes:
        put(node, 2, steps=1_000_000, timeout_s=20, perseus=under_a_plan(node))
    started = start_all(cluster)
    wait_for(lambda: len(iterations(first, "run")) >= 3, "iterations under the plan", started)
    cluster.lose(first)
    assert started[1].wait(timeout=run_log.GIVE_UP_S) != 0
    assert_restored(second)
    wait_until(lambda: not second.guardians(), "the end of the guardian")


def date_offset(folder):
    """Compile what gives a process another date."""
    library = folder / "date_offset.so"
    source = Path(__file__).with_name("date_offset.c")
    flags = ["-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    subprocess.run(["cc", *flags, "-o", str(library), str(source)], check=True)
    return library
