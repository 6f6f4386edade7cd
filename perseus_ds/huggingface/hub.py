"""Reading a model from the Hugging Face hub, with one request per node."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast

import torch.distributed as dist
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from perseus_ds.client.agreement import store_of_job
from perseus_ds.errors import ConfigError
from perseus_ds.protocol import places

T = TypeVar("T")
# Without this timeout, transformers waits for more than 20 s for every file.
_HUB_ANSWERS_S = 5.0
_STORE_PERIOD_S = 0.1


class HubOptions(TypedDict, total=False):
    """How a model is read from the hub, as in ``from_pretrained`` of transformers."""

    revision: str | None
    token: str | bool | None
    trust_remote_code: bool


def hub_options(options: dict[str, Any]) -> HubOptions:
    """Return those of a stage's options that say how a model is read from the hub."""
    return cast("HubOptions", {name: options[name] for name in HubOptions.__annotations__ if name in options})


def read_from_hub(read: Callable[..., T], what: str, name: str | Path, *, hub: HubOptions, **options: Any) -> T:
    """Call a function that reads something of a model, with local files only if the hub does not respond.

    Args:
        read: Such as ``from_pretrained`` of a class of transformers.
        what: What it reads.
        name: The model's name on the hub, or a folder.
        hub: How the model is read from the hub.
        **options: Other arguments of the function.

    Raises:
        ConfigError: It cannot be read.
    """
    name = str(name)
    # Without a value, transformers waits for an answer on the terminal.
    options |= {"trust_remote_code": False, **hub}
    if Path(name).is_dir():
        return _read_files(read, what, name, hub_answers=True, **options)
    revision = hub.get("revision")
    with _first_of_node(f"{name}/{revision}/{what}") as is_first:
        hub_answers = is_first and _hub_answers(name, revision, hub.get("token"))
        return _read_files(read, what, name, hub_answers=hub_answers, **options)


def _read_files(read: Callable[..., T], what: str, name: str, *, hub_answers: bool, **options: Any) -> T:
    try:
        return read(name, local_files_only=not hub_answers, **options)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        if hub_answers:
            cause = " ".join(str(error).split())
            raise ConfigError(
                f"{name}: cannot read a {what} ({cause}). Give the name of a model on the hub, or a folder written by "
                "save_pretrained."
            ) from error
        raise ConfigError(
            f"{name}: not a folder, and the hub does not respond within {_HUB_ANSWERS_S:g} s; this machine has no "
            f'copy of its {what}. With a network, run "hf download {name} --local-dir FOLDER", and give that folder.'
        ) from error


@contextmanager
def _first_of_node(what: str) -> Iterator[bool]:
    """Yield whether this process is the first one of its node to read something. Others wait until that one has it.

    They then read its copy, so that the hub gets one request of each node. If it fails, they are first ones too.
    This is no agreement of all ranks: only those that read take part, for as long as a download takes.
    """
    if not dist.is_initialized():
        yield True
        return
    store = store_of_job()
    key = f"perseus/hub/{socket.gethostname()} {places.boot_id()}/{what}"
    if store.add(f"{key}/begun", 1) > 1:
        # Not store.wait, which would keep other threads from the store.
        while not store.check([f"{key}/ended"]):
            time.sleep(_STORE_PERIOD_S)
        yield store.get(f"{key}/ended") == b"failed"
        return
    result = b"failed"
    try:
        yield True
        result = b"read"
    finally:
        store.set(f"{key}/ended", result)


def _hub_answers(name: str, revision: str | None, token: str | bool | None) -> bool:
    try:
        HfApi(token=token).model_info(name, revision=revision, timeout=_HUB_ANSWERS_S)
    except HfHubHTTPError:
        pass  # there is no such model or no access to it, which transformers reports
    except Exception:
        return False
    return True
