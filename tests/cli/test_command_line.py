"""What every command has in common: help, arguments, messages about wrong ones, and completion."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perseus_ds.cli.arguments import arguments_of, parse
from perseus_ds.cli.main import COMMANDS, command_of, description_of


def composed(command, *words):
    return parse(command, command_of(command), words)


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(run, words):
    code, out, _ = run(*words)
    assert code == 0
    assert all(f"  {command} " in out and description_of(command).splitlines()[0][:40] in out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_tells_its_actions_arguments_and_examples(run, command):
    code, out, _ = run(command, "--help")
    assert (code, out) == run("help", command)[:2]
    assert code == 0
    assert f"usage: perseus-ds {command}" in out
    text = " ".join(out.split())
    for argument in arguments_of(command_of(command)).values():
        assert f"  {argument.name} " in out
        assert argument.description in text
        assert argument.kind in text
        assert not argument.default_text or f"default: {argument.default_text}" in text
        assert all(f"  {choice} " in out for choice, meaning in argument.choices.items() if meaning)
    assert "\nexamples:\n" in out
    assert all(f"\n  {example}" in out for example in command_of(command).examples)


@pytest.mark.parametrize(
    ("command", "example"), [(command, e) for command in COMMANDS for e in command_of(command).examples]
)
def test_examples_of_the_help_are_right(command, example):
    words = shlex.split(example.removeprefix('eval "$(').replace(')"', ""), comments=True)
    assert words[:2] == ["perseus-ds", command]
    composed(command, *words[2:])


def test_the_version_is_the_packages(run):
    assert run("--version")[1].startswith("perseus-ds 0.")


def test_without_a_command_the_usage_is_an_error(run):
    code, out, _ = run()
    assert (code, out.startswith("usage: perseus-ds COMMAND")) == (2, True)


def test_help_imports_nothing_heavy():
    script = (
        "import sys\nfrom perseus_ds.cli.main import COMMANDS\nfrom perseus_ds.cli.main import main\n"
        "main(['--help'])\nfor command in COMMANDS:\n    main(['help', command])\n"
        "heavy = {'torch', 'deepspeed', 'numpy', 'scipy', 'matplotlib', 'pydantic', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "perseus-ds nonsense: there is no such command; commands are optimize,"),
        (
            ["share", "limit=40kW"],
            "perseus-ds share: this command was removed in version 0.2.0. Give each job a cap of",
        ),
        (["optimse"], "perseus-ds optimse: there is no such command; did you mean 'optimize'?"),
        (["optimize"], "profile and out are missing: write profile=… out=…"),
        (["control"], 'command and run are missing: write command=… run=… (see "perseus-ds control --help").'),
        (["optimize", "profle=x"], "profle: there is no such argument; did you mean 'profile'?"),
        (["optimize", "zzz=x"], "zzz: there is no such argument; arguments are profile, out,"),
        (["optimize", "p", "out"], "'out': expected key=value; did you mean 'out'?"),
        (["optimize", "p", "out=y", "--plans=3"], "'--plans=3': expected key=value; did you mean 'plans'?"),
        (["optimize", "p", "out=y", "stages=many"], "stages: expected a whole number, at least 1, got 'many'."),
        (["optimize", "p", "out=y", "stages=1.5"], "stages: expected a whole number, at least 1, got '1.5'."),
        (["optimize", "p", "out=y", "plans=1"], "plans: expected a whole number, at least 2, got '1'."),
        (
            ["optimize", "p", "out=y", "blocking_power_w=inf"],
            "blocking_power_w: expected a number, at least 0, got 'inf'",
        ),
        (["optimize", "p", "out=y", "switch_cost_j=nan"], "switch_cost_j: expected a number, at least 0, got 'nan'"),
        (["optimize", "p", "out=y", "solver=exat"], "expected exact or lowtime, got 'exat'; did you mean 'exact'?"),
        (["control", "policy", "run", "policy=slow"], "policy: expected a {key: value, …}, got 'slow'."),
        (
            ["control", "statu", "run"],
            "expected one of status, policy, straggler, reduce, pause, resume, got 'statu'; did you",
        ),
        (["completion", "fish"], "shell: expected bash or zsh, got 'fish'."),
    ],
)
def test_wrong_arguments_say_what_to_write_and_exit_with_2(run, words, message):
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["help", "optimize"], []])
def test_text_that_cannot_be_printed_is_an_error_in_words(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "perseus_ds", *words], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 2
    assert done.stderr.endswith(": No space left on device.\n")
    assert len(done.stderr.splitlines()) == 1


def test_a_path_may_be_the_first_word_whatever_its_name_is():
    for name in ("runs/demo", "3", "null", "a b", "it's", "runs/a=b,c", "[x"):
        assert str(composed("optimize", name, "out=y").profile) == name


@given(st.text(st.characters(blacklist_categories=("Cs", "Cc")), min_size=1))
def test_a_path_may_have_any_name(name):
    assert composed("report", f"run={name}").run == Path(name)


def test_an_order_and_the_folder_of_its_job_may_stand_in_any_order():
    for words in (["status", "perseus"], ["perseus", "status"], ["run=perseus", "status"], ["status", "run=perseus"]):
        arguments = composed("control", *words)
        assert (arguments.command.name, str(arguments.run)) == ("status", "perseus")


def test_one_value_is_a_list_of_one():
    assert composed("report", "r", "runs=a").runs == composed("report", "r", "runs=[a]").runs == [Path("a")]
    assert composed("report", "r", "runs=[1,a b]").runs == [Path("1"), Path("a b")]


@pytest.mark.parametrize(
    "words", [["policy.name=power_cap", "policy.watts=900"], ["policy={name: power_cap, watts: 900}"]]
)
def test_a_policy_may_be_given_key_by_key(words):
    assert composed("control", "policy", "perseus", *words).policy == {"name": "power_cap", "watts": 900}


def test_times_of_day_in_a_policy_are_texts():
    policy = composed("control", "policy", "p", "policy={windows: [{begin: 17:00, end: 9:30}, {begin: 22:00}]}").policy
    assert policy == {"windows": [{"begin": "17:00", "end": "9:30"}, {"begin": "22:00"}]}


# Fills in what bash fills in before it calls a completion function; = ends a word there.
CALL = """
COMP_LINE={line}; COMP_POINT=${{#COMP_LINE}}
read -ra COMP_WORDS <<< "${{COMP_LINE//=/ = }}"
[[ $COMP_LINE == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
_perseus_ds
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture
def complete(run, tmp_path):
    (tmp_path / "perseus").mkdir()
    (tmp_path / "profile.csv").touch()
    code, script, _ = run("completion", "bash")
    assert code == 0

    def complete(line, before=""):
        text = f"{script}{before}\n{CALL.format(line=shlex.quote(line))}"
        finished = subprocess.run(["bash", "-c", text], cwd=tmp_path, check=True, capture_output=True, text=True)
        return finished.stdout.split()

    return complete


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("perseus-ds op", ["optimize"]),
        ("perseus-ds help rep", ["report"]),
        ("perseus-ds profile sh", ["show"]),
        ("perseus-ds optimize so", ["solver="]),
        ("perseus-ds optimize solver=", ["exact", "lowtime"]),
        ("perseus-ds optimize perseus solver=l", ["lowtime"]),
        ("perseus-ds optimize profile=pr", ["profile.csv"]),
        ("perseus-ds report pers", ["perseus"]),
        ("perseus-ds optimize plans=", []),
        ("perseus-ds doctor lock=t", ["true"]),
        ("perseus-ds watch runs --o", ["--once"]),
        ("perseus-ds nonsense zz", []),
    ],
)
def test_words_are_completed(complete, line, words):
    assert complete(line) == words


def test_where_an_equals_sign_does_not_end_a_word_the_key_is_kept(complete):
    assert complete("perseus-ds optimize solver=e", before="COMP_WORDBREAKS=' '") == ["solver=exact"]


def test_zsh_gets_the_same_function(run):
    bash, zsh = (run("completion", shell)[1] for shell in ("bash", "zsh"))
    assert zsh == f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash}"
