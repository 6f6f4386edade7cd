"""Every example in the pages is run, or checked with the parsers and models of what it calls.

What no test can run here, such as training on GPUs, is parsed: commands by the parsers of ``perseus-ds`` and of the
launchers, settings by the models of the configuration, code by Python and by the signatures of the functions it calls.
Outputs must consist of words that the code prints. Blocks of an unknown kind are an error.
"""

import ast
import functools
import importlib
import inspect
import itertools
import json
import re
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from perseus_ds.cli.main import COMMANDS, GROUPS, command_of, parse
from perseus_ds.config import PerseusConfig, parse_block
from perseus_ds.policy.commands import parse_command
from perseus_ds.policy.goal import Goal

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder in (".", "docs", "docs/developers", "benchmarks", "examples/*")
    for page in ROOT.glob(f"{folder}/*.md")
    if page.name not in ("CHANGELOG.md", "commands.md")
)
"""Pages with examples. Those of commands.md, which is made from the help, are run by tests/cli/test_command_line.py."""
OF_THE_SYSTEM = {
    ".",
    "cargo",
    "git",
    "kubectl",
    "mkdir",
    "pre-commit",
    "python -m http.server",
    "python -m venv",
    "sbatch",
}
OF_THE_SYSTEM |= {"srun", "zeusd"}
"""Programs of which nothing is checked but what they start."""
NAMES = {"GPTModel", "gpt", "Et"}
"""Words in outputs that the examples' jobs chose."""
DIAGRAMS = {"docs/developers/agent.md", "docs/developers/architecture.md"}
"""Pages whose text blocks are drawings."""


class Block(NamedTuple):
    page: str
    line: int
    language: str
    text: str


def of_page(page):
    """Return the fenced blocks of a page."""
    content = page.read_text(encoding="utf-8")
    return [
        Block(str(page.relative_to(ROOT)), content[: found.start()].count("\n") + 1, found[2], found[3])
        for found in re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", content, re.MULTILINE | re.DOTALL)
    ]


BLOCKS = [block for page in PAGES for block in of_page(page)]


def inline_code(page):
    """Return what is in backticks on a page, outside of its blocks."""
    content = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", content)]


# Settings.


def check_settings(text):
    """Check a JSON object that contains a block, or keys of one or of a goal."""
    found = json.loads(text)
    if "perseus" in found:
        parse_block(found["perseus"])
    elif found.keys() <= PerseusConfig.model_fields.keys():
        parse_block(found)
    elif found.keys() <= Goal.model_fields.keys():
        parse_block({"goal": found})
    else:
        parse_command(found)


def check_json(block):
    if block.text.startswith("{"):
        check_settings(block.text)
        return
    for line in block.text.splitlines():  # keys of a block, one in each line
        check_settings(f"{{{line}}}")


# Commands.


def commands_of(text):
    """Return the commands of a shell script as lists of words, without what stands for something left out."""
    commands = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            commands.append(words[: words.index("&&")])
            words = words[words.index("&&") + 1 :]
        commands.append(words)
    return [[word for word in words if word != "…"] for words in commands if words]


def check_bash(block):
    for words in commands_of(block.text):
        check_command(words)


def check_cron(block):
    for line in block.text.splitlines():
        assert re.match(r"(?:[\d*/,-]+ ){4}[\d*/,-]+  ", line), line
        check_command(shlex.split(line)[5:])


def check_command(words):
    """Check a command with the parser of the program that it starts."""
    while assigned := re.fullmatch(r"([A-Z_]+)=(.*)", words[0]):
        if assigned[1] == "PERSEUS" and assigned[2].startswith("{"):
            parse_block(json.loads(assigned[2]))
        words = words[1:]
        if not words:
            return
    program, *arguments = words
    if program == "python" and arguments[0].endswith(".py"):
        check_script(*arguments)
    elif program in PROGRAMS:
        PROGRAMS[program](arguments)
    else:
        name = next((known for known in OF_THE_SYSTEM if " ".join(words).startswith(known)), None)
        assert name is not None, f"no test knows how to check {program}: {words}"
        if "perseus-ds" in arguments:
            check_command(words[words.index("perseus-ds") :])
        for path in (word for word in arguments if word.startswith("examples/")):
            assert (ROOT / path).exists(), path


def check_make(arguments):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for argument in arguments:
        name, is_variable, _ = argument.partition("=")
        if is_variable:
            assert f"$({name})" in makefile or f",{name})" in makefile or re.search(rf"\({name}\)", makefile), argument
        else:
            assert re.search(rf"^{name}:", makefile, re.MULTILINE), argument


def check_torchrun(arguments):
    from torch.distributed.run import get_args_parser

    given = get_args_parser().parse_args(arguments)
    check_script(given.training_script, *given.training_script_args, is_module=given.module)


def check_deepspeed(arguments):
    from deepspeed.launcher.runner import parse_args

    given = parse_args(arguments)
    check_script(given.user_script, *given.user_args, is_module=given.module)


def check_pip(arguments):
    assert arguments[0] == "install", arguments
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r"^\.\[(.*)\]$", "\n".join(arguments), re.MULTILINE):
        assert named in extras


def check_script(script, *arguments, is_module=False):
    """Check a script of the repository, or the user's own, which ``perseus_ds.launch`` may start."""
    if is_module and script == "perseus_ds.launch":
        check_script(*arguments)
        return
    if not script.startswith(("examples/", "benchmarks/", "docs/")):
        return
    path = ROOT / script
    code = path.read_text(encoding="utf-8")
    if configured := re.search(r'hydra.main\(.*config_path="(.*?)"', code):
        check_overrides((path.parent / configured[1]).resolve(), arguments)
        return
    known = set(re.findall(r'add_argument\(\s*"(--[\w-]+)"', code))
    for flag in (word for word in arguments if word.startswith("--")):
        assert flag in known, f"{script} has no {flag}"


def check_overrides(folder, arguments):
    """Check settings of an example with its configuration."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    overrides = ["perseus.mode=profile" if word == "--profile" else word for word in arguments]
    with initialize_config_dir(str(folder), version_base="1.3"):
        composed = compose("config", overrides)
    parse_block(OmegaConf.to_container(composed.perseus, resolve=True))


PROGRAMS = {
    "export": check_command,
    "perseus-ds": parse,
    "make": check_make,
    "torchrun": check_torchrun,
    "deepspeed": check_deepspeed,
    "pip": check_pip,
}
"""Checks of a command's arguments, by program."""


# Code.


def check_python(block):
    """Check names of the package, arguments of its functions, and settings in the code of a block."""
    tree = ast.parse(block.text)
    names = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            object_of(node, names)  # an error if our package has no such name
        elif isinstance(node, ast.Call):
            check_call(node, names)
        elif isinstance(node, ast.Dict):
            check_literal(node)


def imported_names(tree):
    """Import what the code imports of this package, and return it by name."""
    names = {"perseus_ds": importlib.import_module("perseus_ds")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("perseus_ds"):
                    importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("perseus_ds"):
            module = importlib.import_module(node.module)
            names |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return names


def object_of(node, names):
    """Return the object of this package that an expression names, or None."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if not isinstance(node, ast.Attribute):
        return None
    if isinstance(node.value, ast.Attribute) and node.value.attr == "perseus":  # such as engine.perseus.set_goal
        from perseus_ds.engines.engine import Session

        return getattr(Session, node.attr)
    owner = object_of(node.value, names)
    return None if owner is None or inspect.isfunction(owner) else getattr(owner, node.attr)


def check_call(node, names):
    function = object_of(node.func, names)
    is_partial = any(isinstance(each, ast.Starred) or each == ... for each in node.args)
    if function is None or is_partial or any(is_ellipsis(each) for each in node.args):
        return
    positional = [None] * (len(node.args) + ("Session." in function.__qualname__))
    inspect.signature(function).bind(*positional, **dict.fromkeys(keyword.arg for keyword in node.keywords))


def is_ellipsis(node):
    return isinstance(node, ast.Constant) and node.value is ...


def check_literal(node):
    """Check the block in the literal of a DeepSpeed config, or a goal."""
    for key, value in zip(node.keys, node.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "perseus":
            parse_block(ast.literal_eval(value))
    if all(isinstance(key, ast.Constant) and key.value in Goal.model_fields for key in node.keys):
        parse_block({"goal": ast.literal_eval(node)})


# Outputs.


@functools.cache
def printed_pairs():
    """Return pairs of neighbouring words in texts of the code. A word beside an inserted value stands alone."""
    pairs = set()
    for path in [*(ROOT / "perseus_ds").rglob("*.py"), *(ROOT / "examples").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                words = re.findall(r"[A-Za-z_'-]+", node.value)
                pairs |= set(zip(["", *words], [*words, ""], strict=True))
    return pairs


def is_printed(first, second):
    """Return whether two words stand next to each other in a text, or may be next to each other in two of them."""
    pairs = printed_pairs()
    return (first, second) in pairs or ((first, "") in pairs and ("", second) in pairs)


def check_text(block):
    """Check that an output has only words that the code prints, next to each other as in the code."""
    if block.page in DIAGRAMS:
        return
    sent = [line[2:] for line in block.text.splitlines() if line.startswith("→ ")]
    for line in sent:
        if '"fly"' not in line:
            parse_command(json.loads(line))
    for line in block.text.splitlines():
        if line.startswith(("→ ", "← ")):
            continue
        for part in re.split(r"[^A-Za-z_' -]+", line):
            words = [word.strip("'") for word in re.findall(r"[A-Za-z_'-]+", part) if re.search("[a-z]", word)]
            for first, second in itertools.pairwise(words):
                assert first in NAMES or second in NAMES or is_printed(first, second), (
                    f"{block.page}:{block.line}: no text of the code has {first!r} before {second!r}: {line}"
                )


CHECKS = {"bash": check_bash, "cron": check_cron, "json": check_json, "python": check_python, "text": check_text}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}:{block.line}")
def test_an_example_is_right(block):
    assert block.language in CHECKS, f"{block.page}:{block.line}: no test checks a block of {block.language!r}"
    CHECKS[block.language](block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_settings_in_sentences_are_right(page):
    for code in inline_code(page):
        if re.match(r"perseus-ds \w", code):
            check_named_command(shlex.split(code)[1:])
        elif re.match(r'(\{ *)?"\w+": [^…]*$', code) and "event" not in code:
            check_settings(code if code.startswith("{") else f"{{{code}}}")
        elif re.match(r"[\w.]*perseus\w*\.\w+\([^)]", code) and "…" not in code:
            check_python(Block(page.name, 0, "python", code))
        elif re.match(r"(make|pip|deepspeed|torchrun|python|sbatch|srun|kubectl) \S", code):
            for words in commands_of(code):
                check_command(words)


def check_named_command(words):
    """Check a command that is named in a sentence, perhaps without all of its arguments."""
    name = next((known for known in (" ".join(words[:2]), words[0]) if known in COMMANDS or known in GROUPS), None)
    assert name is not None, words
    if name in COMMANDS:
        known = {f"--{field.replace('_', '-')}" for field in command_of(name).__dataclass_fields__}
        assert {word for word in words if word.startswith("--")} <= known, words


def test_there_are_examples():
    """The pages are found, and no block is overlooked."""
    fences = sum(len(re.findall(r"^ *```", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert len(BLOCKS) * 2 == fences > 150
