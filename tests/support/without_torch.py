"""Skips tests that need torch if it is not installed, for `make test-pythons`."""

from __future__ import annotations

from collections.abc import Generator

import pytest

_MISSING = frozenset({"torch", "deepspeed", "transformers", "datasets", "hydra", "megatron"})
_PROCESSES_NEED_IT = (
    "tests/cli/test_command_line.py::test_the_version_is_that_of_the_package",
    "tests/cli/test_command_line.py::test_text_that_cannot_be_printed_is_an_error_in_words[words0]",
    "tests/cli/test_reset_doctor_commands.py::test_doctor_without_a_driver",
    "tests/cli/test_reset_doctor_commands.py::test_doctor_finds_the_programs_with_which_deepspeed_compiles",
    "tests/cli/test_reset_doctor_commands.py::test_doctor_for_",
    "tests/cli/test_reset_doctor_commands.py::test_doctor_says_that_the_first_job_compiles_silently",
    "tests/cli/test_watch_command.py::test_a_private_folder_does_not_hide_the_jobs_beside_it[command1]",
    "tests/clients/test_launch.py::test_engines_of_an_untouched_script_get_perseus",
    "tests/test_dependencies.py",
    "tests/test_documentation.py::test_every_public_name_has_a_reference",
    "tests/test_examples_in_pages.py",
    "tests/test_public_names.py::test_each_public_name_is_that_of_its_object[initialize]",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items[:] = [item for item in items if not item.nodeid.startswith(_PROCESSES_NEED_IT)]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    excinfo = report.call.excinfo if report.failed else None  # type: ignore[attr-defined]
    return _without(report, excinfo)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _without(report, call.excinfo if report.failed else None)


def _without(report, excinfo):
    """Mark a report as skipped if the test or module failed because a package is missing."""
    error = None if excinfo is None else excinfo.value
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] in _MISSING:
            report.outcome, report.longrepr = "skipped", (report.nodeid, 0, "needs torch")
        error = error.__cause__ or error.__context__
    return report
