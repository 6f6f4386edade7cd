"""Bash completes commands, arguments, choices and paths with the script of ``perseus-ds completion``."""

import shlex
import subprocess

import pytest

from perseus_ds.cli.main import main

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
def complete(tmp_path, capsys):
    (tmp_path / "perseus").mkdir()
    (tmp_path / "profile.csv").touch()
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out

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


def test_zsh_gets_the_same_function(capsys):
    main(["completion", "bash"])
    bash = capsys.readouterr().out
    main(["completion", "zsh"])
    assert (
        capsys.readouterr().out
        == f"autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n{bash}"
    )
