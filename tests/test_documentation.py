"""Links and messages in the documentation exist, and generated pages agree with the code."""

import ast
import functools
import importlib
import importlib.util
import json
import re
from pathlib import Path

import pytest

import perseus_ds
from perseus_ds.artifacts.evidence import CheckResult, Evidence, Figure, Machine
from perseus_ds.artifacts.frontier import Frontier, Provenance
from perseus_ds.artifacts.plan import FrequencyPlan
from perseus_ds.artifacts.profile import COLUMNS
from perseus_ds.pipeline.instruction import Instruction, Kind

ROOT = Path(__file__).parent.parent
OUR_MODELS = (Provenance, Evidence, Machine, CheckResult, Figure)
"""Models whose keys are described on the page by hand."""
FOLDERS_OF_PAGES = (".", "docs", "docs/*", "benchmarks", "examples/*")
PAGES = sorted(page for folder in FOLDERS_OF_PAGES for page in ROOT.glob(f"{folder}/*.md"))


def headings(page: Path) -> set[str]:
    """Return the anchors of a page, as made by GitHub and the documentation site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} does not exist"
        assert not anchor or anchor in headings(file), f"{target} has no such heading"


def test_pages_named_in_the_code_exist():
    """Messages, docstrings and comments of the code, the examples and the settings name pages."""
    folders = ("perseus_ds", "benchmarks", "examples", "configs", "tests", ".github")
    files = [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".yml")
    ]
    named = {name for file in files for name in re.findall(r"\bdocs/[\w/-]+\.md", file.read_text(encoding="utf-8"))}
    assert len(named) > 5
    assert not [name for name in named if not (ROOT / name).exists()]


def test_paths_named_in_contributing_exist():
    """Paths are relative to the repository's root or to the package. NAME and … are placeholders."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([\w./-]+(?:/|\.(?:py|md|yaml|toml|lock)))`", text)
    paths = [path for path in named if not re.search("NAME|site/", path)]
    assert len(paths) > 30
    assert not [p for p in paths if not (ROOT / p).exists() and not (ROOT / "perseus_ds" / p).exists()]


def test_the_layout_in_contributing_names_every_folder():
    rows = re.findall(r"^\| (`.*`) \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    named = {name.strip("`/") for row in rows for name in row.split(", ")}
    entries = {path.name for path in (ROOT / "perseus_ds").iterdir() if path.suffix in ("", ".py")}
    assert named >= {name for name in entries if not name.startswith("__")}


@functools.cache
def literals() -> list[str]:
    """Return all string literals of the package, with … for inserted values."""
    found = []
    for path in sorted((ROOT / "perseus_ds").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [part.value if isinstance(part, ast.Constant) else "…" for part in node.values]
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%[sdr]", "…", node.value))
            elif isinstance(node, ast.BinOp) and isinstance(node.left, ast.JoinedStr | ast.Constant):
                found.append(ast.unparse(node))
    return found


TROUBLESHOOTING = (ROOT / "docs/troubleshooting.md").read_text()
MESSAGES = re.findall(r"^### `(.*)`$|^- `(.*?)`:", TROUBLESHOOTING, re.MULTILINE)


@pytest.mark.parametrize("message", [heading or reason for heading, reason in MESSAGES])
def test_messages_quoted_in_troubleshooting_are_in_the_code(message):
    # A leading or final … may stand for several inserted values.
    quoted = message.removeprefix("…").removesuffix("…").strip(": ")
    assert any(quoted in text for text in literals())


def test_enough_messages_are_explained():
    assert len(MESSAGES) > 30


def test_every_public_name_has_a_reference():
    shown = re.findall(r"^::: ([\w.]+)$", (ROOT / "docs/python.md").read_text(), re.MULTILINE)
    assert len(set(shown)) == len(shown)
    assert {f"perseus_ds.{name}" for name in perseus_ds.__all__} <= set(shown)
    for name in shown:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize("name", ["configuration.md", "commands.md", "files.md"])
def test_reference_pages_are_those_of_the_code(name):
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs/reference.py")
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    page = (ROOT / "docs" / name).read_text()
    assert page == reference.PAGES[name](), 'run "python docs/reference.py"'


def test_keys_of_our_files_are_documented(tmp_path):
    page = (ROOT / "docs/files.md").read_text()
    keys = [key for model in OUR_MODELS for key in model.model_fields]
    plan = FrequencyPlan(((Instruction(0, Kind.FORWARD, 0),),), ((1410,),), 1.0, 2.0, 1.9)
    provenance = Provenance(schedule="s", micro_batches=1, stages=2, blocking_power_w=1.0, solver="exact")
    file = json.loads(Frontier((plan,), 1.0, plan, provenance).save(tmp_path).read_text())
    columns = (tmp_path / "frontier.csv").read_text().splitlines()[0].split(",")
    keys += [*file, *file["plans"][0], *columns, *COLUMNS]
    assert not [key for key in keys if f"`{key}`" not in page]
