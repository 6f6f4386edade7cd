"""Costs of the layers of Hugging Face models, and the resulting cuts."""

import pytest
import torch
from pipelines import one_f_one_b
from tiny_models import tiny, token_ids
from virtual.time import VirtualTime

import perseus_ds
from perseus_ds.errors import ConfigError
from perseus_ds.huggingface.partition import measured_costs, measured_passes, simulated_costs
from perseus_ds.huggingface.stages import build_stage, skeleton
from perseus_ds.layouts.partition import best_partition
from perseus_ds.pipeline.instruction import Kind
from perseus_ds.simulation.device_models import DEVICES
from perseus_ds.simulation.gpu import SimulatedGpu

A100 = DEVICES["a100-sxm"]
TOKENS = 32


def costs(config, **options):
    return simulated_costs(config, A100, (2, TOKENS // 2), **options)


def test_simulated_times_are_those_of_the_floating_point_operations():
    config = tiny("llama", vocab_size=4096, tie_word_embeddings=False)
    found = costs(config)
    layer = sum(p.numel() for p in skeleton(config).base_model.layers[1].parameters() if p.dim() > 1)
    # Two products of queries, keys and values of 32 channels, in two sequences.
    attention = 4 * 2 * (TOKENS // 2) ** 2 * 32
    operations = 2 * TOKENS * layer + attention
    head = 2 * TOKENS * 32 * 4096
    assert found.layers == 4
    relative = found.time_s[Kind.FORWARD][:, -1] / found.time_s[Kind.FORWARD][1, -1]
    assert relative == pytest.approx([1, 1, 1, 1 + head / operations])
    assert found.time_s[Kind.BACKWARD] == pytest.approx(2 * found.time_s[Kind.FORWARD])
    slower = found.time_s[Kind.FORWARD][0] / found.time_s[Kind.FORWARD][0, -1]
    assert slower == pytest.approx([A100.slowdown(c) / A100.slowdown(A100.top_clock_mhz) for c in found.clocks_mhz])
    assert found.simulated


def test_memory_has_weights_and_what_the_backward_needs():
    config = tiny("llama", vocab_size=4096, tie_word_embeddings=False)
    found = costs(config)
    whole = sum(p.numel() for p in skeleton(config).parameters())
    assert found.fixed_bytes.sum() == 16 * whole
    assert found.held_bytes[-1] > found.held_bytes[1] + 4 * TOKENS * 4096  # the loss holds logits in fp32
    again = costs(config, checkpointing=True)
    assert again.held_bytes[1] == TOKENS * 32 * 2 < found.held_bytes[1]  # only the hidden states
    assert again.time_s[Kind.BACKWARD][1, -1] > found.time_s[Kind.BACKWARD][1, -1]


@pytest.mark.parametrize("family", ["mixtral", "gemma2"])
def test_layers_of_other_families_have_costs(family):
    found = costs(tiny(family))
    assert all((found.time_s[kind] > 0).all() and (found.energy_j[kind] > 0).all() for kind in found.time_s)


def test_layers_that_differ_are_distinguished():
    found = costs(tiny("qwen2_moe", mlp_only_layers=[1], intermediate_size=512))
    assert found.parameters[1] < found.parameters[0] / 5 < found.parameters[2]
    assert found.time_s[Kind.FORWARD][1, -1] != pytest.approx(found.time_s[Kind.FORWARD][2, -1])


def test_passes_on_a_gpu_are_measured_at_each_clock():
    time = VirtualTime()
    gpu = SimulatedGpu(A100, lock_latency_s=0.01, timebase=time)

    def work(seconds):
        gpu.begin_work()
        gpu.finish_work(seconds)
        return torch.zeros(())

    passes = measured_passes(lambda: work(0.01), lambda _: work(0.03), gpu, (705, 1410), timebase=time)
    for kind, work_s in ((Kind.FORWARD, 0.01), (Kind.BACKWARD, 0.03)):
        times_s, energies_j = passes[kind]
        assert times_s == pytest.approx([work_s * A100.slowdown(clock) for clock in (705, 1410)], rel=1e-3)
        assert energies_j == pytest.approx(times_s * [A100.power_w(clock) for clock in (705, 1410)], rel=0.1)


class Ticking(VirtualTime):
    """A time that advances whenever it is read."""

    def now_s(self):
        self.seconds += 0.5
        return self.seconds


def measured(**settings):
    time = Ticking()
    gpu = SimulatedGpu(A100, lock_latency_s=0.0, timebase=time, **settings)
    return gpu, measured_costs(tiny("qwen3"), gpu, torch.device("cpu"), (1, 8), dtype=torch.float32, timebase=time)


def test_layers_are_measured_at_some_clocks_and_estimated_between():
    gpu, found = measured()
    assert found.clocks_mhz[-1] == gpu.locked_clock_mhz == A100.top_clock_mhz  # back at the default clock
    assert found.clocks_mhz[0] == 705
    assert len(found.clocks_mhz) > 8
    assert all((found.time_s[kind] > 0).all() and found.time_s[kind].shape[0] == 4 for kind in found.time_s)
    assert found.blocking_power_w == pytest.approx(A100.blocking_power_w, rel=0.1)


def test_without_permission_layers_are_measured_at_default_clocks():
    _, found = measured(may_lock=False)
    assert found.clocks_mhz == (A100.top_clock_mhz,)
    partition = best_partition(found, one_f_one_b(2, 4))
    assert partition.fastest.planned_j == partition.fastest.energy_j
    assert partition.time_gap == 0


def test_a_partition_is_a_cut_for_stages():
    config = tiny("llama", num_hidden_layers=6, vocab_size=2048, tie_word_embeddings=False)
    found = perseus_ds.partition(config, stages=3, micro_batches=4, sequence_length=16)
    assert found.known["uniform"].cut == (2, 2, 2)
    assert found.cut[-1] == 1  # the head costs as much as many layers
    assert found.fastest.time_s < found.known["uniform"].time_s
    assert found.time_gap == 0
    ids = token_ids()
    for index in range(3):
        ids = build_stage(config, found.cut, index)(ids)
    assert ids.shape[-1] == 2048


def test_what_cannot_be_cut_is_an_error():
    config = tiny("llama")
    with pytest.raises(ConfigError, match="1 to 4 stages, not 5"):
        perseus_ds.partition(config, stages=5, micro_batches=4)
    with pytest.raises(ConfigError, match="expected one of a100-sxm"):
        perseus_ds.partition(config, stages=2, micro_batches=4, gpu="a1000")
    with pytest.raises(ConfigError, match=r"memory: .* recompute activations"):
        perseus_ds.partition(config, stages=2, micro_batches=4, memory_gib=1e-6)
