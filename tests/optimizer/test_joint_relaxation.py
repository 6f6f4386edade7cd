"""Flows that are optimal for pairs of neighbouring ranks together."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import one_f_one_b, synthetic_profile

from perseus_ds.artifacts.profile import Measurement, StageProfile
from perseus_ds.optimizer.exact.certificate import Verifier
from perseus_ds.optimizer.exact.joint_relaxation import JointRelaxation
from perseus_ds.optimizer.exact.network import Network
from perseus_ds.optimizer.exact.problem import Problem
from perseus_ds.optimizer.exact.relaxation import Relaxation
from perseus_ds.pipeline.dag import Dag
from perseus_ds.pipeline.instruction import Kind


def two_clocks(stages, seed):
    """Two clocks far apart, so that hulls contain mixtures that neighbouring stages cannot run together."""
    rng = np.random.default_rng(seed)
    return StageProfile(
        [
            Measurement(stage, kind, clock, work_s * scale * slower, energy_j * work_s * 10)
            for stage in range(stages)
            for kind, work_s in ((Kind.FORWARD, 0.05), (Kind.BACKWARD, 0.1))
            for scale in [rng.uniform(0.9, 1.1)]
            for clock, slower, energy_j in ((1400, 1.0, 60.0), (1000, 1.2, 30.0))
        ]
    )


def bounds_j(problem, slowdown):
    """The bound from the relaxed problem's own flow, and from the flow for pairs of ranks."""
    relaxation = Relaxation(Network(problem))
    relaxed = relaxation.solve(problem.t_min_s * (1 + slowdown))
    flows_w = np.maximum(relaxed.flow_w, 0.0), JointRelaxation.of(relaxation).flow_w(relaxed.deadline_s)
    verifier = Verifier(problem)
    return [verifier.bound_j(relaxed.deadline_s, *relaxation.network.dag_flow(flow_w)) for flow_w in flows_w]


def test_flows_for_pairs_of_ranks_prove_more_where_clocks_are_few():
    problem = Problem(Dag.build(one_f_one_b(4, 24)), two_clocks(4, 3), 8.0)
    gains = [joint_j / own_j - 1 for own_j, joint_j in (bounds_j(problem, s) for s in (0.05, 0.08, 0.11, 0.14))]
    assert np.mean(gains) > 1e-3


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 4), st.integers(8, 14), st.floats(0.01, 0.3))
def test_a_flow_for_pairs_of_ranks_is_conserved(ranks, micro_batches, slowdown):
    problem = Problem(Dag.build(one_f_one_b(ranks, micro_batches)), synthetic_profile(ranks), 80.0)
    relaxation = Relaxation(Network(problem))
    edges_w, source_w = relaxation.network.dag_flow(
        JointRelaxation.of(relaxation).flow_w(problem.t_min_s * (1 + slowdown))
    )
    tail, head = problem.edges
    nodes = len(problem.dag.nodes)
    into, out = np.bincount(head, edges_w, nodes) + source_w, np.bincount(tail, edges_w, nodes)
    ends = np.array([not after for after in problem.dag.successors])
    assert into[~ends] == pytest.approx(out[~ends], abs=1e-6 * source_w.sum())


def test_one_rank_alone_has_no_neighbour():
    assert JointRelaxation.of(Relaxation(Network(Problem(Dag.build(one_f_one_b(1, 8)), two_clocks(1, 0), 8.0)))) is None
