"""``perseus_ds`` exports exactly the public names, without importing torch."""

import subprocess
import sys

import pytest

import perseus_ds

OF_TRAINING = {"initialize", "attach", "detach", "register_command", "PerseusRuntime"}
OF_TRAINING |= {"pipeline_module", "pipeline_stage", "partition", "save_pretrained"}
NAMES = OF_TRAINING | {
    "read_schedule",
    "schedule_class",
    "Instruction",
    "Kind",
    "StageProfile",
    "Frontier",
    "optimize",
}


def modules_after(statement):
    """Return the modules loaded by a new Python process after a statement."""
    script = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    return set(finished.stdout.split())


def test_nothing_else_is_promised():
    assert set(perseus_ds.__all__) == NAMES


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_name_is_what_it_says(name):
    assert getattr(perseus_ds, name).__name__ == name


def test_importing_the_package_loads_no_other_package():
    loaded = modules_after("import perseus_ds")
    assert not {"numpy", "scipy", "pydantic", "torch", "deepspeed"} & loaded
    assert {name for name in loaded if name.startswith("perseus_ds")} == {"perseus_ds"}


def test_what_plans_without_training_is_there_without_torch():
    planning = ", ".join(sorted(NAMES - OF_TRAINING))
    assert not {"torch", "deepspeed"} & modules_after(f"from perseus_ds import {planning}")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'optimise'"):
        perseus_ds.optimise  # noqa: B018
