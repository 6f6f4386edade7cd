"""Runs GPT-NeoX's ``train.py`` with Perseus. Its launcher ``deepy.py`` requires a script."""

import runpy

import perseus_ds.launch

perseus_ds.launch.attach_when_engines_are_imported()
runpy.run_path("train.py", run_name="__main__")
