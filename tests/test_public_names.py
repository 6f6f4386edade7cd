"""``perseus_ds`` exports its public names at their first use, and plans without torch."""

import subprocess
import sys

import pytest

import perseus_ds

OF_TRAINING = {"initialize", "attach", "detach", "register_command", "PerseusRuntime"}
OF_TRAINING |= {"pipeline_module", "pipeline_stage", "partition", "save_pretrained"}


def modules_after(statement):
    """Return the modules loaded by a new Python process after a statement."""
    script = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(finished.stdout.split())


@pytest.mark.parametrize("name", perseus_ds.__all__)
def test_each_public_name_is_that_of_its_object(name):
    assert getattr(perseus_ds, name).__name__ == name


def test_importing_the_package_loads_no_other_package():
    loaded = modules_after("import perseus_ds")
    assert not {"numpy", "scipy", "pydantic", "torch", "deepspeed"} & loaded
    assert {name for name in loaded if name.startswith("perseus_ds")} == {"perseus_ds"}


def test_planning_needs_no_torch():
    planning = ", ".join(sorted(set(perseus_ds.__all__) - OF_TRAINING))
    assert not {"torch", "deepspeed"} & modules_after(f"from perseus_ds import {planning}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        perseus_ds.optimise  # noqa: B018
