import ast
import tracemalloc

import pytest
from pipelines import dual_pipe_v, one_f_one_b, synthetic_profile

from perseus_ds.artifacts.frontier import export_zeus, read_plans, read_zeus
from perseus_ds.errors import FrontierError
from perseus_ds.optimizer import frontier_of_imported, optimize
from perseus_ds.optimizer.problem import problem_for
from perseus_ds.pipeline.instruction import Kind

ALL = (Kind.FORWARD, Kind.BACKWARD, Kind.TAIL)


def test_plans_come_back_with_the_same_clocks_times_and_energies(tmp_path):
    schedule, profile = dual_pipe_v(2, 4), synthetic_profile(4, simulated=True)
    frontier = optimize(schedule, profile, blocking_power_w=80.0, plans=6)
    assert len(export_zeus(frontier, tmp_path / "plans")) == len(frontier.plans)
    back = frontier_of_imported(read_plans(tmp_path / "plans"), problem_for(schedule, profile, blocking_power_w=80.0))
    assert [p.clocks_mhz for p in back.plans] == [p.clocks_mhz for p in frontier.plans]
    assert [p.energy_j for p in back.plans] == pytest.approx([p.energy_j for p in frontier.plans])
    assert (back.provenance.solver, back.provenance.simulated) == ("imported", True)


def test_a_file_is_what_zeus_evaluates_to_one_list_a_rank_of_instruction_and_clock(tmp_path):
    profile = synthetic_profile(2, kinds=ALL)
    frontier = optimize(one_f_one_b(2, 2), profile, blocking_power_w=80.0, plans=4)
    path = export_zeus(frontier, tmp_path)[0]
    assert path.name == "freqs_pipeline_00000.py"
    ranks = eval(path.read_text())  # as Zeus's server does
    assert [name for name, _ in ranks[0]] == ["forward", "forward", "backward", "backward"]
    assert [clock for _, clock in ranks[0]] == list(frontier.plans[0].clocks_mhz[0][:-1])
    back = frontier_of_imported(read_plans(tmp_path), problem_for(one_f_one_b(2, 2), profile, blocking_power_w=80.0))
    assert {clocks[-1] for plan in back.plans for clocks in plan.clocks_mhz} == {1410}, "a tail without a clock"


def test_comments_and_trailing_commas_are_read_as_python_reads_them(tmp_path):
    text = "# plan (1)\n[\n  [('forward', 900), (\"backward\", 1410,),],  # it's rank 0\n  [],\n]\n# [end\n"
    (tmp_path / "plan.py").write_text(text)
    assert read_zeus(tmp_path / "plan.py") == ast.literal_eval(text)


def test_plans_are_read_one_at_a_time(tmp_path):
    (tmp_path / "freqs_pipeline_00000.py").write_text(GOOD)
    (tmp_path / "freqs_pipeline_00001.py").write_text("nonsense")
    plans = read_plans(tmp_path)
    assert next(plans)[0].name == "freqs_pipeline_00000.py"
    with pytest.raises(FrontierError, match=r"freqs_pipeline_00001\.py: not a list"):
        next(plans)


def test_a_large_plan_takes_little_memory(tmp_path):
    text = "[[" + "('forward', 1410), " * 10_000 + "]]"
    (tmp_path / "plan.py").write_text(text)
    tracemalloc.start()
    try:
        assert len(read_zeus(tmp_path / "plan.py")[0]) == 10_000
        assert tracemalloc.get_traced_memory()[1] < 30 * len(text)
    finally:
        tracemalloc.stop()


GOOD = "[[('forward', 900), ('backward', 900)], [('forward', 1410), ('backward', 1410)]]"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__('os').system('echo owned > owned')", "not a list"),
        ("[" * 5000, "not a list"),
        ("[3]", "rank 0: expected a list, found 3"),
        ("[[], [('forward', 900), 3]]", r"rank 1, instruction 1: expected \(instruction, MHz\).* found 3"),
        ("[[('forward', true)]]", "rank 0, instruction 0"),
    ],
)
def test_a_bad_plan_file_is_named_and_never_executed(tmp_path, monkeypatch, text, message):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "freqs_pipeline_00007.py"
    path.write_text(text)
    with pytest.raises(FrontierError, match=rf"freqs_pipeline_00007\.py: {message}"):
        read_zeus(path)
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace(", ('backward', 900)", ""), "rank 0, instruction 1: the .* has backward, the plan nothing"),
        (GOOD.replace("900", "901"), r"no row for stage 0, forward, 901 MHz\. Give the profile for which"),
        ("[[('forward', 900), ('backward', 900)]]", "1 ranks, the schedule has 2"),
    ],
)
def test_a_plan_that_does_not_fit_names_file_rank_and_instruction(tmp_path, text, message):
    (tmp_path / "freqs_pipeline_00000.py").write_text(text)
    problem = problem_for(one_f_one_b(2, 1), synthetic_profile(2), blocking_power_w=80.0)
    with pytest.raises(FrontierError, match=rf"freqs_pipeline_00000\.py.*{message}"):
        frontier_of_imported(read_plans(tmp_path), problem)
