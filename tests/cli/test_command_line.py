"""Common behaviour of all commands: help, arguments, errors and completion."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import make_job, write_auto_run

from perseus_ds.cli.jobs import SetCommand
from perseus_ds.cli.main import COMMANDS, GROUPS, command_of, description_of, parse
from perseus_ds.policy.goal import Goal


def in_words(text):
    """Return a text as one line, without the boxes around it."""
    return " ".join(word for word in text.split() if word.strip("│╭╮╰╯─|+-"))


@pytest.mark.parametrize("group", GROUPS)
def test_help_lists_every_command_of_a_group(run, group):
    code, out, _ = run(*group.split(), "--help")
    assert (code, out) == run("help", *group.split())[:2]
    assert code == 0
    depth = len(group.split())
    for command in COMMANDS:
        if command.startswith(group):
            name = " ".join(command.split()[: depth + 1])
            assert f" {name.split()[-1]} {description_of(name).splitlines()[0]}" in in_words(out)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_describes_its_arguments_and_examples(run, command):
    code, out, _ = run(*command.split(), "--help")
    assert code == 0
    assert out.startswith(f"usage: perseus-ds {command} [-h]")
    assert in_words(description_of(command)) in in_words(out)
    for name in command_of(command).__dataclass_fields__:
        assert f" --{name.replace('_', '-')}" in out or name.upper().replace("_", "-") in out
    # Each argument is described, with its default.
    described = in_words(out.partition("show this help message and exit")[2])
    assert not any(f"{kind} (" in described for kind in ("PATH", "INT", "FLOAT", "STR", "TIME"))
    for example in command_of(command).examples:
        assert f"\n  {example}" in out
        assert isinstance(parse(shlex.split(example)[1:]), command_of(command))


_NEEDS_MORE = {"control", "doctor", "reset"}
"""Commands that need a running job or a GPU."""


@pytest.mark.extended
def test_the_examples_of_all_commands_work_after_each_other(run, tmp_path):
    for name in ("perseus", "perseus-2"):
        (tmp_path / name).mkdir()
        write_auto_run(tmp_path / name, make_job())
    examples = [example for command in COMMANDS for example in command_of(command).examples]
    for example in examples:
        words = shlex.split(example)[1:]
        needs_model = words[0] == "partition" and words[1] != "perseus"
        if words[0] not in _NEEDS_MORE and not needs_model:
            code, _, err = run(*words)
            assert code == 0, f"{example}: {err}"


def test_every_key_of_a_goal_is_an_argument():
    assert set(SetCommand.__dataclass_fields__) - {"run"} == set(Goal.model_fields)


def test_the_version_is_that_of_the_package(run):
    assert run("--version")[1].startswith("perseus-ds 0.")
    quick = "import sys; from perseus_ds.cli.main import main; main(['--version']); assert 'tyro' not in sys.modules"
    subprocess.run([sys.executable, "-c", quick], check=True, capture_output=True)


def test_help_imports_nothing_heavy_and_is_printed_in_any_encoding():
    script = (
        "import sys\nfrom perseus_ds.cli.main import COMMANDS\nfrom perseus_ds.cli.main import main\n"
        "main(['--help'])\nfor command in COMMANDS:\n    main(['help', *command.split()])\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'matplotlib', 'pydantic', 'pynvml', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True)


OPTIMIZE = ["optimize", "p", "--out", "y"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["optimse"], "perseus-ds optimse: there is no such command; did you mean 'optimize'?"),
        (["optimize"], "Missing from perseus-ds optimize: PROFILE profile.csv or its folder;"),
        ([*OPTIMIZE, "--stagse", "8"], "Unrecognized options: --stagse, 8 Perhaps you meant: --stages INT"),
        ([*OPTIMIZE, "--stages", "many"], "parsing --stages: expected a whole number, at least 1, got 'many'."),
        (
            ["control", "set", "r", "--watts", "9", "--until", "3"],
            "parsing --until: expected a time such as 2030-01-31T08",
        ),
        (["compare"], "RUNS]: expected at least one value, got none."),
        (["--tyro-write-completion", "ksh", "x"], "expected bash, zsh, fish, got 'ksh'."),
    ],
)
def test_wrong_arguments_are_an_error_that_says_what_to_write(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in in_words(err)
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ModuleNotFoundError("No module", name="transformers"), "doctor: this command needs the package transformers"),
        (ZeroDivisionError("a fault of Perseus"), "ZeroDivisionError: a fault of Perseus"),
    ],
)
def test_an_unexpected_error_is_not_the_answer_no(run, monkeypatch, error, message):
    def fail(self):
        raise error

    monkeypatch.setattr("perseus_ds.cli.machine.DoctorCommand.execute", fail)
    code, out, err = run("doctor")
    assert (code, out) == (2, "")
    assert message in err


def test_text_that_cannot_be_printed_is_an_error_in_words():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "perseus_ds", "help", "optimize"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "perseus-ds optimize: No space left on device.\n"


@settings(max_examples=20)
@given(
    st.sampled_from(["3", "null", "None", "a b", "it's", "runs/a=b,c", "[x"])
    | st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1).filter(lambda name: name[0] != "-")
)
def test_a_path_may_be_any_text(name):
    assert parse(["report", f"--run={name}", "--out", name]).run == parse(["report", name]).run == Path(name)


@pytest.mark.parametrize("given", [["p"], ["--profile", "p"], ["--profile=p"]])
def test_the_positional_argument_may_be_given_by_name_and_anywhere(given):
    others = ["--schedules", "1f1b", "zbv", "--plans", "4"]
    for words in ([*given, *others], [*others, *given]):
        arguments = parse(["schedules", *words])
        assert (arguments.profile, arguments.schedules, arguments.plans) == (Path("p"), ["1f1b", "zbv"], 4)


def test_bash_completes_words(run, tmp_path):
    assert run("--tyro-write-completion", "bash", "completion.sh")[0] == 0
    for line, word in (("profile sh", "show"), ("optimize --so", "--solver"), ("optimize --solver ex", "exact")):
        call = (
            f"source completion.sh; COMP_WORDS=(perseus-ds {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            "$(complete -p perseus-ds | sed -E 's/.*-F ([^ ]+).*/\\1/'); printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(["bash", "-c", call], cwd=tmp_path, check=True, capture_output=True, text=True)
        assert word in done.stdout.split()
