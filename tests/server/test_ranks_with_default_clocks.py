"""Ranks that keep their default clock, because it cannot be set or changes much later than those of others."""

import pytest
from virtual.job import VirtualJob

from perseus_ds.artifacts.run_events import Failed, ProfileWritten
from perseus_ds.protocol.job_messages import LatencyTable
from perseus_ds.server.job import RankState
from perseus_ds.simulation.gpu import SimulatedGpu

CLOCKS_MHZ = (1200, 1305, 1410)


def latencies(**seconds):
    return LatencyTable({(clock, rises == "up"): [s] * 3 for clock in CLOCKS_MHZ for rises, s in seconds.items()})


def test_the_delay_of_a_rank_is_that_of_its_agent_and_its_driver():
    state = RankState(latencies=latencies(up=0.015, down=0.02), late_s=0.03)
    assert state.delay_s(CLOCKS_MHZ) == pytest.approx(0.045)


def test_a_clock_that_a_limit_keeps_a_gpu_from_reaching_does_not_make_its_driver_slow():
    state = RankState(latencies=latencies(up=0.11, down=0.015))
    assert state.delay_s(CLOCKS_MHZ) == pytest.approx(0.015)


def test_a_rank_is_not_slow_because_the_latencies_of_others_are_not_known_yet(tmp_path):
    job = VirtualJob(tmp_path, stages_s=(0.036, 0.05), micro_batches=4, mode="auto")
    server, said = job.server.job, []
    server.states[0].latencies = latencies(up=0.05, down=0.05)
    server.fix_slow_ranks(said.append)
    assert (said, server.fixed_ranks) == ([], set())
    server.states[1].latencies = latencies(up=0.01, down=0.01)
    server.fix_slow_ranks(said.append)
    assert server.fixed_ranks == {0}
    job.close()


class OneWithoutPermission(SimulatedGpu):
    @classmethod
    def named(cls, *arguments, seed, **settings):
        return super().named(*arguments, seed=seed, may_lock=seed != 1, **settings)


def test_a_rank_whose_clocks_cannot_be_set_costs_only_its_own_share(tmp_path, caplog):
    job = VirtualJob(tmp_path, stages_s=(0.036, 0.05), micro_batches=6, gpu_class=OneWithoutPermission, mode="auto")
    job.train_until_compared()
    job.train(40)
    records = job.close()
    assert len(job.events(ProfileWritten)) == 1
    assert job.events(Failed) == []
    assert "Default clocks are kept on rank 1" in caplog.text
    planned = [record for record in records if record.plan is not None][-10:]
    assert sum(record.energy_j for record in planned) < 0.95 * sum(record.default_energy_j for record in planned)
    asked = {record.clocks_asked_mhz for record in planned if record.clocks_asked_mhz is not None}
    assert all(of_rank_0 is not None and of_rank_1 is None for of_rank_0, of_rank_1 in asked)


def test_an_agent_that_sees_marks_late_costs_only_the_clocks_of_its_own_rank(tmp_path, capsys):
    job = VirtualJob(tmp_path, stages_s=(0.036, 0.05, 0.036), micro_batches=6, mode="auto")
    job.agent_link(0).late_s = 0.06
    for _ in range(80):
        job.train()
        job.time.sleep(0.1)  # otherwise the start of the next iteration wakes the agent
    records = job.close()
    assert "clock changes of rank 0 take" in capsys.readouterr().out
    planned = [record for record in records if record.plan is not None][-10:]
    asked = [record.clocks_asked_mhz for record in planned if record.clocks_asked_mhz is not None]
    assert asked
    assert {clocks[0] for clocks in asked} == {None}
    assert sum(record.energy_j for record in planned) < sum(record.default_energy_j for record in planned)
