"""Fixtures for every test."""

from stub_nvml.fixtures import make_stub_nvml, stub_library, stub_nvml, stub_nvml_here, stub_time

__all__ = ["make_stub_nvml", "stub_library", "stub_nvml", "stub_nvml_here", "stub_time"]
