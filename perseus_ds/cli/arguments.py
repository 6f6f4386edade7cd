"""The arguments of a command: Hydra overrides on its default YAML, checked by a pydantic model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from perseus_ds.errors import ConfigError

Model = TypeVar("Model", bound="Arguments")


class Arguments(BaseModel):
    """Base of every command's arguments: no other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def config_dir() -> Path:
    """Return the folder of the default configs: the wheel's own, or the checkout's.

    Raises:
        ConfigError: The installation is incomplete.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "configs", package.parent / "configs"):
        if (folder / "cli").is_dir():
            return folder
    raise ConfigError(f"{package / 'configs'}: the default configs are missing. Install perseus-ds again.")


def defaults_text(command: str) -> str:
    """Return a command's default YAML, whose comments explain its arguments."""
    return (config_dir() / "cli" / f"{command}.yaml").read_text(encoding="utf-8")


def quoted(path: Path | str) -> str:
    """Return a path as the value of an override, whatever is in its name."""
    from hydra.core.override_parser.types import Quote, QuotedString

    return str(QuotedString(str(path), Quote.single).with_quotes())


def compose(command: str, overrides: Sequence[str], model: type[Model]) -> Model:
    """Return a command's arguments.

    Args:
        command: Name of its YAML in ``configs/cli``.
        overrides: ``key=value`` words as Hydra reads them.
        model: What the values must be.

    Raises:
        ConfigError: An unknown, missing or unreadable argument, or one of the wrong type.
    """
    values = _compose(command, overrides)
    missing = [key for key, value in values.items() if value == "???"]
    if missing:
        raise ConfigError(f'{missing[0]} is missing: write {missing[0]}=… (see "perseus-ds {command} --help").')
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{key}={first['input']}: {first['msg']}.") from None


def _compose(command: str, overrides: Sequence[str]) -> dict[str, Any]:
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    folder = config_dir() / "cli"
    known = list(OmegaConf.load(folder / f"{command}.yaml"))
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if "=" not in override:
            raise ConfigError(f'{override!r}: expected key=value (see "perseus-ds {command} --help").')
        if key not in known:
            raise ConfigError(f"{key}: there is no such argument. Arguments: {', '.join(known)}.")
    try:
        with initialize_config_dir(str(folder), version_base=None):
            composed = hydra_compose(command, overrides=list(overrides))
        return OmegaConf.to_container(composed, resolve=True)  # type: ignore[return-value]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{' '.join(overrides)}: Hydra cannot read these arguments ({str(error).splitlines()[0]}). Quote values "
            "with special characters twice: 'key=\"a=b\"'."
        ) from None
