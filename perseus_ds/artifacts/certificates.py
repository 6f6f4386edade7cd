"""``certificates.npz``: the proofs of a frontier's lower bounds."""

from __future__ import annotations

import io
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from perseus_ds.artifacts.io import open_bounded, parse_json
from perseus_ds.artifacts.schedule_streams import ScheduleStreams
from perseus_ds.artifacts.validation import MIB, brief, explain
from perseus_ds.errors import FrontierError
from perseus_ds.pipeline.schedule import Schedule

Floats = npt.NDArray[np.float64]

FILE_NAME = "certificates.npz"
SCHEMA_VERSION = 1
_MOST_BYTES = 256 * MIB
_REMEDY = 'Run "perseus-ds optimize" with --certificates again.'
# By name: type and number of dimensions of each array.
_ARRAYS = {
    "schema_version": ("int64", 0),
    "schedule": ("uint8", 1),
    "edge_flow_w": ("float64", 2),
    "source_flow_w": ("float64", 2),
    "mixed": ("int64", 2),
    "share": ("float64", 1),
}


@dataclass(frozen=True)
class Certificates:
    """Flows through the DAG. A mixture of two of them proves each plan's bound.

    :mod:`perseus_ds.optimizer.bounds` explains how a flow proves a bound.

    Attributes:
        schedule: Schedule of the DAG for which the flows were computed.
        edge_flow_w: Shape (flows, edges of the DAG), in the order of ``dag.predecessors`` [W].
        source_flow_w: Shape (flows, nodes of the DAG): flow into nodes without predecessors [W].
        mixed: Shape (plans, 2): indices of the two flows.
        share: Shape (plans,): share of the second flow, 0 to 1.
    """

    schedule: Schedule
    edge_flow_w: Floats
    source_flow_w: Floats
    mixed: npt.NDArray[np.int64]
    share: Floats

    def flow_w(self, plan: int) -> tuple[Floats, Floats]:
        """Return the flow over the edges and into nodes without predecessors for one plan's proof [W]."""
        (first, second), share = self.mixed[plan], self.share[plan]
        edges, source = self.edge_flow_w, self.source_flow_w
        return (1 - share) * edges[first] + share * edges[second], (1 - share) * source[first] + share * source[second]

    def to_bytes(self) -> bytes:
        data = io.BytesIO()
        np.savez_compressed(
            data,
            allow_pickle=False,
            schema_version=np.int64(SCHEMA_VERSION),
            schedule=np.frombuffer(ScheduleStreams.of(self.schedule).model_dump_json().encode(), dtype=np.uint8),
            edge_flow_w=self.edge_flow_w,
            source_flow_w=self.source_flow_w,
            mixed=self.mixed,
            share=self.share,
        )
        return data.getvalue()

    @classmethod
    def load(cls, path: Path) -> Certificates:
        """Read the file, given its path or its folder. If it is not valid, a :class:`FrontierError` is raised."""
        path = path / FILE_NAME if path.is_dir() else path
        if not path.exists():
            raise FrontierError(f"{path}: no such file; it contains the proofs of the lower bounds. {_REMEDY}")
        try:
            with open_bounded(path, FrontierError, FILE_NAME, _MOST_BYTES) as file:
                arrays = _read_arrays(file)
            version = int(arrays["schema_version"])
            if version != SCHEMA_VERSION:
                raise ValueError(f"schema_version is {version}, this perseus-ds reads {SCHEMA_VERSION}")
            streams = ScheduleStreams.model_validate(parse_json(arrays["schedule"].tobytes()))
            flows = ("edge_flow_w", "source_flow_w", "mixed", "share")
            result = cls(streams.to_schedule(), *(arrays[name] for name in flows))
            result._check()
        except ValidationError as error:
            raise FrontierError(f"{explain(error, ScheduleStreams, f'{path}: schedule.')} {_REMEDY}") from None
        except ValueError as error:
            raise FrontierError(f"{path}: not a complete file of certificates ({brief(error)}). {_REMEDY}") from None
        return result

    def _check(self) -> None:
        flows = len(self.edge_flow_w)
        if len(self.source_flow_w) != flows or self.mixed.shape != (len(self.share), 2):
            raise ValueError("the arrays do not belong together")
        if not ((self.mixed >= 0) & (self.mixed < flows)).all():
            raise ValueError(f"mixed: expected indices of {flows} flows")
        if not ((self.share >= 0) & (self.share <= 1)).all():
            raise ValueError("share: expected fractions from 0 to 1")


def _read_arrays(file: BinaryIO) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays, checking the archive's directory before anything is unpacked."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if sorted(entry.filename for entry in entries) != sorted(f"{name}.npy" for name in _ARRAYS):
            raise ValueError(f"expected {', '.join(sorted(_ARRAYS))}, found {len(entries)} others")
        total = sum(entry.file_size for entry in entries)
        if total > _MOST_BYTES:
            raise ValueError(f"{total} bytes of arrays, at most {_MOST_BYTES} are read")
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: np.asanyarray(loaded[name]) for name in _ARRAYS}  # bytes if it is not an array
    except Exception as error:  # zipfile, zlib and NumPy raise many kinds of errors for damaged files
        raise ValueError(str(error) or type(error).__name__) from None
    for name, (dtype, dimensions) in _ARRAYS.items():
        found = arrays[name]
        if found.dtype != dtype or found.ndim != dimensions:
            raise ValueError(
                f"{name}: expected {dtype} in {dimensions} dimensions, found {found.dtype} of shape {found.shape}"
            )
    return arrays
