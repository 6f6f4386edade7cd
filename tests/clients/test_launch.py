"""A script under the launcher runs as without it, and its engines get Perseus."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import run_log
from forked import free_port
from job import DEEPSPEED

from perseus_ds.launch import parse

LAUNCH = [sys.executable, "-m", "perseus_ds.launch"]
NOTHING = "perseus: nothing was attached in this process"


def write(folder, name, text):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    return path


def run(command, folder, **environment):
    paths = os.pathsep.join([str(Path(__file__).parents[2]), str(Path(__file__).parents[1] / "support")])
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": paths, **environment},
    )


SPEAKING = """
    import json, pickle, sys, os, inspect
    class Thing: pass
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0], "package": __package__,
        "main": sys.modules["__main__"].Thing is Thing, "spec": __spec__ and __spec__.name,
        "pickled": pickle.loads(pickle.dumps(Thing())).__class__ is Thing,
        "source": inspect.getsource(Thing).strip(), "doc": __doc__,
        "deepspeed": "deepspeed" in sys.modules, "torch": "torch" in sys.modules,
    }))
"""


def test_a_script_sees_what_it_sees_without_the_launcher(tmp_path):
    script = write(tmp_path, "jobs/train.py", SPEAKING)
    arguments = [str(script), "--lr", "1", "-m", "x"]
    plain, launched = run([sys.executable, *arguments], tmp_path), run([*LAUNCH, *arguments], tmp_path)
    assert plain.stderr == ""
    assert launched.stderr.startswith(NOTHING)
    assert json.loads(launched.stdout) == json.loads(plain.stdout)
    assert json.loads(plain.stdout)["argv"] == arguments


@pytest.mark.parametrize("name", ["package.train", "package"])
def test_a_module_sees_what_it_sees_without_the_launcher(tmp_path, name):
    write(tmp_path, "package/__init__.py", "")
    write(tmp_path, "package/__main__.py", SPEAKING)
    write(tmp_path, "package/train.py", SPEAKING)
    arguments = ["-m", name, "--lr", "1"]
    plain, launched = run([sys.executable, *arguments], tmp_path), run([*LAUNCH, *arguments], tmp_path)
    assert plain.stderr == ""
    assert launched.stderr.startswith(NOTHING)
    assert json.loads(launched.stdout) == json.loads(plain.stdout)


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("raise ValueError('mine')", 1)])
def test_the_exit_code_and_the_error_are_the_scripts(tmp_path, ending, code):
    script = write(tmp_path, "train.py", f"import sys\n{ending}\n")
    plain, launched = run([sys.executable, str(script)], tmp_path), run([*LAUNCH, str(script)], tmp_path)
    assert launched.returncode == plain.returncode == code
    assert launched.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:]
    assert NOTHING not in launched.stderr


@pytest.mark.parametrize(
    ("rank", "script", "lines"),
    [
        ("0", "", 1),
        ("0", "raise SystemExit", 1),
        ("1", "", 0),
        ("0", "import sys; sys.modules['perseus_ds.client.runtime'] = None", 0),  # the script itself has attached
    ],
)
def test_a_script_to_which_nothing_is_attached_is_reported_once_in_a_job(tmp_path, rank, script, lines):
    finished = run([*LAUNCH, str(write(tmp_path, "train.py", script))], tmp_path, RANK=rank)
    assert finished.stderr.count(NOTHING) == finished.stderr.count("\n") == lines


def test_handlers_and_objects_of_the_script_outlive_its_last_line(tmp_path):
    script = write(
        tmp_path,
        "train.py",
        """
        import atexit, sys, __main__
        value = "kept"
        def last():
            print(value, __main__.value, sys.modules["__main__"].value)
        atexit.register(last)
        """,
    )
    assert run([*LAUNCH, str(script)], tmp_path).stdout == "kept kept kept\n"


def test_processes_of_the_script_start(tmp_path):
    script = write(
        tmp_path,
        "train.py",
        """
        import multiprocessing
        class Item:
            def __init__(self, value): self.value = value
        def work(item): return Item(item.value * 2)
        if __name__ == "__main__":
            for method in ("fork", "spawn", "forkserver"):
                with multiprocessing.get_context(method).Pool(1) as pool:
                    print(pool.map(work, [Item(1)])[0].value)
        """,
    )
    finished = run([*LAUNCH, str(script)], tmp_path)
    assert finished.stdout.split() == ["2"] * 3, finished.stderr


def test_a_script_that_is_not_there_is_the_interpreters_message(tmp_path):
    finished = run([*LAUNCH, "nowhere.py"], tmp_path)
    assert finished.returncode != 0
    assert "can't open file 'nowhere.py': [Errno 2] No such file or directory" in finished.stderr
    assert "No module named nowhere" in run([*LAUNCH, "-m", "nowhere"], tmp_path).stderr


def test_what_deepspeeds_launcher_puts_first_goes_to_the_script():
    assert parse(["--local_rank=1", "train.py", "--lr"]) == (["--local_rank=1"], "train.py", ["--lr"], False)
    assert parse(["--local_rank=1", "-m", "a.b", "-m"]) == (["--local_rank=1"], "a.b", ["-m"], True)
    with pytest.raises(SystemExit, match="usage"):
        parse(["-x"])


@pytest.mark.extended
def test_engines_of_an_untouched_script_get_perseus(tmp_path):
    script = write(
        tmp_path,
        "train.py",
        """
        from deepspeed import initialize
        from one_rank_engine import batches, config, module, one_rank
        with one_rank("."):
            model = module()
            engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config())
            engine.train_batch(batches())
            engine.destroy()
        """,
    )
    block = {"mode": "observe", "device": "simulated", "simulated": {"longest_instruction_s": 0.001}}
    finished = run([*LAUNCH, str(script)], tmp_path, PERSEUS=json.dumps(block))
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert len(run_log.iterations(run_log.records(tmp_path / "perseus"))) == 1


@pytest.fixture
def megatron(tmp_path):
    """A function that writes a package that is used like Megatron-Core."""

    def megatron(core=""):
        package = tmp_path / "megatron" / "core" / "pipeline_parallel"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package.parent / "__init__.py").write_text(core)
        write(package, "schedules.py", "def get_forward_backward_func(): return 'theirs'")

    return megatron


USES_MEGATRON = """
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
    print(get_forward_backward_func(), get_forward_backward_func())
"""
NOT_SET = "perseus: the job trains without Perseus: the variable PERSEUS is not set.\n"


def test_a_copy_of_megatron_core_without_a_version_is_left_alone(tmp_path, megatron):
    megatron()
    finished = run([*LAUNCH, str(write(tmp_path, "train.py", USES_MEGATRON))], tmp_path, PERSEUS="{}")
    assert finished.stdout.strip() == "theirs theirs", finished.stderr[-3000:]


def test_a_job_with_megatron_core_and_without_settings_is_told_so_once(tmp_path, megatron):
    megatron("__version__ = '0.16.1'")
    script = write(tmp_path, "train.py", USES_MEGATRON)
    for rank, expected in (("0", NOT_SET), ("1", "")):
        finished = run([*LAUNCH, str(script)], tmp_path, RANK=rank)
        assert (finished.stdout.strip(), finished.stderr) == ("theirs theirs", expected)


def test_ranks_that_the_script_starts_itself_are_launched_too(tmp_path, megatron):
    megatron("__version__ = '0.16.1'")
    script = write(
        tmp_path,
        "train.py",
        """
        import multiprocessing, os
        def train():
            from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
            get_forward_backward_func()
        if __name__ == "__main__":
            os.chdir("/")
            for method in ("fork", "spawn", "forkserver"):
                rank = multiprocessing.get_context(method).Process(target=train)
                rank.start()
                rank.join()
        """,
    )
    assert run([*LAUNCH, str(script)], tmp_path).stderr == 3 * NOT_SET


@pytest.mark.integration
@pytest.mark.extended
def test_deepspeeds_launcher_starts_it(tmp_path):
    script = write(
        tmp_path,
        "train.py",
        """
        import json, os, sys
        with open(f"rank{os.environ['RANK']}.json", "w") as out:
            json.dump([sys.argv[1:], __name__], out)
        """,
    )
    launcher = [DEEPSPEED, "--master_port", str(free_port()), "--num_gpus", "2", "--module"]
    finished = run([sys.executable, *launcher, "perseus_ds.launch", str(script), "--lr", "0.5"], tmp_path)
    assert finished.returncode == 0, finished.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    assert ranks == [[[f"--local_rank={rank}", "--lr", "0.5"], "__main__"] for rank in (0, 1)]
