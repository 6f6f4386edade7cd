import pytest
from layouts import job_of
from tiny_models import tiny

from perseus_ds.artifacts.profile import StageProfile
from perseus_ds.artifacts.schedule_streams import ScheduleStreams


@pytest.fixture(autouse=True)
def model(run):
    """A folder "llama" with the configuration of a model with a heavy head."""
    config = tiny("llama", num_hidden_layers=6, vocab_size=4096, tie_word_embeddings=False)
    config.save_pretrained("llama")


def test_cuts_of_a_model_are_printed_with_the_one_to_train_with(run):
    words = ["--stages", "2", "--micro-batches", "3", "--sequence-length", "16", "--gpu", "h100-sxm"]
    code, out, err = run("partition", "llama", *words)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    rows = {line[:12].strip(): line for line in lines if "GiB" in line}
    assert rows.keys() == {"uniform", "parameters", "fastest", "most frugal"}
    assert "[3, 3]" in rows["uniform"]
    assert "No cut is faster than the fastest one: proven." in lines
    assert "simulated H100-SXM" in lines[0]
    assert "SIMULATED" in out
    cut = lines[-1].removeprefix("Train with cut=").removesuffix(".")
    assert cut in rows["most frugal"]
    assert cut in ("[4, 2]", "[5, 1]")


def write_job(folder, *stages, **changes):
    """Write the profile of a Megatron-Core job, as in profile mode."""
    job = job_of(*stages, simulated=True, micro_batches=8)
    info = {"layout": job.layout, "streams": ScheduleStreams.of(job.schedule), "micro_batches": 8, "model": "GPTModel"}
    info |= {"pipeline_ranks": len(stages), "stages": len(stages)} | changes
    profile = StageProfile(job.profile.measurements, job.profile.info.model_copy(update=info))
    profile.save(folder / "profile.csv")
    return job


@pytest.fixture
def trained(tmp_path):
    return write_job(tmp_path / "job", "Eddd", "dddd", "dddd", "ddddh")


def test_the_layout_of_a_job_is_printed_in_the_notation_of_its_engine(run, trained):
    code, out, err = run("partition", "job", "--layout", "Et*4|t*4|t*4|tttL")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    kinds = {line.split()[0]: line.split() for line in lines if line.startswith(("embedding", "dense", "head"))}
    assert float(kinds["dense"][2]) == pytest.approx(10.0, abs=0.01)  # forward [ms]
    assert float(kinds["head"][5]) == pytest.approx(60.0, abs=0.1)  # backward [ms]
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("today", "given", "proposed"))}
    assert rows.keys() == {"today", "given", "proposed"}
    proposed = lines[-1].removeprefix("--pipeline-model-parallel-layout ").strip("'")
    assert rows["proposed"][1] == proposed != rows["today"][1]
    assert "No layout is faster: proven for these costs." in lines
    assert "SIMULATED" in out


def test_sizes_are_compared_in_one_table(run, tmp_path):
    write_job(tmp_path / "job", "Ed", "dd", "dd", "ddh")
    code, out, _ = run("partition", "job", "--pipeline-sizes", "2", "4", "3", "--virtual-stages", "1", "2")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if line.strip()[:1].isdigit()]
    assert [row[:4] for row in rows if row[-1].startswith("E")] == [
        ["2", "1", "2", "4"], ["2", "2", "2", "4"], ["4", "1", "1", "8"], ["4", "2", "1", "8"]
    ]  # fmt: skip
    energies_j = [float(row[5]) for row in rows if row[-1].startswith("E")]
    assert max(energies_j) < 1.4 * min(energies_j), "all are of the same GPUs and batch"
    assert "4 GPUs are not a multiple of 3 pipeline ranks" in out
    assert "Fastest: " in out


def test_kinds_that_two_stages_hide_are_found_with_another_run(run, tmp_path):
    write_job(tmp_path / "first", "Edddd", "ddddh")
    code, _, err = run("partition", "first")
    assert (code, "distinguished: embedding, dense and head" in err) == (2, True)
    write_job(tmp_path / "second", "Eddd", "dddddh")
    code, out, _ = run("partition", "first", "--also", "second")
    assert code == 0
    assert "Train with:" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["empty"], "no profile.csv, timeline.json or config.json in this folder"),
        (["old"], "layers on its stages were not recorded"),
        (["other"], "the layout has 2 stages, the profile 4"),
        (["job", "--layout", "4,4,4,4"], "the stages have 16 parts, the model 17"),
        (["job", "--layout", "9,8"], "2 stages, the job has 4"),
        (["llama", "--stages", "2"], "--micro-batches is missing"),
    ],
)
def test_inputs_that_do_not_fit_are_an_error_in_one_sentence(run, tmp_path, trained, words, message):
    (tmp_path / "empty").mkdir()
    for name, layout in (("old", None), ("other", trained.layout.cut_into((8, 9)))):
        write_job(tmp_path / name, "Eddd", "dddd", "dddd", "ddddh", layout=layout)
    code, _, err = run("partition", *words)
    assert code == 2
    assert message in err
    assert "Traceback" not in err
