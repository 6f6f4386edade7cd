"""Loads an example's script and its configuration, and builds its model without ranks."""

import importlib.util
import sys
from pathlib import Path

import torch
from deepspeed.pipe import TiedLayerSpec
from hydra import compose, initialize_config_dir

ROOT = Path(__file__).parents[2]


def load(name):
    """Return ``examples/<name>/train.py`` as a module."""
    spec = importlib.util.spec_from_file_location(f"{name}_train", ROOT / "examples" / name / "train.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def config(name, *overrides):
    """Return the example's configuration as passed to its script."""
    with initialize_config_dir(str(ROOT / "configs" / name), version_base="1.3"):
        return compose("config", overrides=list(overrides))


def build(layers):
    """Build the layers like one stage does, tied ones once, and return functions and modules."""
    tied, functions = {}, []
    for layer in layers:
        if isinstance(layer, TiedLayerSpec):
            module = tied.setdefault(layer.key, None) or layer.build()
            tied[layer.key] = module
            function = layer.forward_fn
            functions.append(module if function is None else lambda x, f=function, m=module: f(m, x))
        else:
            functions.append(layer.build())
    return functions, list(dict.fromkeys([*tied.values(), *(f for f in functions if isinstance(f, torch.nn.Module))]))
