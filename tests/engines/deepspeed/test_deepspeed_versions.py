"""Unsupported versions of DeepSpeed are reported, and all files state the same supported ones."""

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import deepspeed
import pytest
from one_rank_engine import config, module, one_rank

import perseus_ds
from perseus_ds.engines.deepspeed import NEWEST_DEEPSPEED, OLDEST_DEEPSPEED, deepspeed_problem
from perseus_ds.engines.deepspeed.engine import check_engine
from perseus_ds.errors import VersionError

ROOT = Path(__file__).parents[3]


def make_deepspeed(folder, version):
    """Install a DeepSpeed that cannot be imported, like old versions with a current torch."""
    metadata = folder / f"deepspeed-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n")
    (folder / "deepspeed").mkdir()
    (folder / "deepspeed" / "__init__.py").write_text("raise ImportError('cannot import name log')\n")


def test_a_deepspeed_that_is_too_old_is_named_before_it_is_imported(tmp_path):
    make_deepspeed(tmp_path, "0.12.6")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import perseus_ds; perseus_ds.initialize(config={{}})"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert finished.stderr.splitlines()[-1] == (
        "perseus_ds.errors.VersionError: DeepSpeed 0.12.6 is too old for perseus-ds, expected "
        f'deepspeed>={OLDEST_DEEPSPEED}. Run: pip install "deepspeed>={OLDEST_DEEPSPEED}"'
    )


@pytest.fixture
def _without_metadata(monkeypatch):
    version = importlib.metadata.version

    def version_of_others(name):
        if name == "deepspeed":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", version_of_others)


@pytest.mark.usefixtures("_without_metadata")
def test_a_missing_deepspeed_is_reported(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VersionError, match=r"DeepSpeed is not installed, expected deepspeed>=.* pip install"):
        perseus_ds.initialize(config={})


@pytest.mark.usefixtures("_without_metadata")
def test_a_source_tree_has_the_version_that_it_states(monkeypatch, tmp_path):
    source = tmp_path / "deepspeed" / "__init__.py"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin=str(source)))
    assert deepspeed_problem() == ""
    (tmp_path / "version.txt").write_text("0.12.6\n")
    assert deepspeed_problem() == f"DeepSpeed 0.12.6 is too old for perseus-ds, expected deepspeed>={OLDEST_DEEPSPEED}"
    (tmp_path / "version.txt").write_text(f"{NEWEST_DEEPSPEED}\n")
    assert deepspeed_problem() == ""


@pytest.mark.usefixtures("_without_metadata")
def test_an_engine_of_a_source_tree_gets_perseus(tmp_path):
    with one_rank(tmp_path):
        model = module()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config())
        perseus_ds.attach(engine, {"mode": "observe", "device": "simulated", "output_dir": str(tmp_path / "perseus")})
        assert engine.perseus.engine.versions() == {"deepspeed": "of unknown version"}
        perseus_ds.detach(engine)


def test_an_engine_without_what_perseus_needs_is_an_error_that_names_what_it_lacks(tmp_path):
    with one_rank(tmp_path):
        model = module()
        engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config())
        check_engine(engine)
        del engine.grid.pp_group
        lacks = r"it lacks PipelineEngine\.grid\.pp_group\. Run: pip install --upgrade perseus-ds"
        with pytest.raises(VersionError, match=lacks):
            perseus_ds.attach(engine)


def test_package_makefile_readme_and_code_name_the_same_oldest_version():
    assert f'"deepspeed>={OLDEST_DEEPSPEED}"' in (ROOT / "pyproject.toml").read_text()
    assert f"OLDEST_DEEPSPEED := {OLDEST_DEEPSPEED}\n" in (ROOT / "Makefile").read_text()
    newest = re.search(r"^deepspeed==(\S+)$", (ROOT / "requirements.lock").read_text(), re.MULTILINE)[1]
    assert newest == NEWEST_DEEPSPEED
    assert f"DeepSpeed {OLDEST_DEEPSPEED} to {newest}" in (ROOT / "README.md").read_text()
