"""Reads files of NumPy arrays that anybody may have made: all that they declare is checked before it is unpacked."""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

# What NumPy writes before an array, less its first ten bytes; NumPy's own reader takes any Python literal.
_HEADER = re.compile(
    rb"\{'descr': '([<>|]?\w{1,20})', 'fortran_order': False, 'shape': \(((?:\d{1,12}(?:, \d{1,12}){0,3},?)?)\), \} *\n"
)
_MOST_HEADER_BYTES = 1024
_MOST_DIRECTORY_BYTES = 65_536
_DIRECTORY_END = struct.Struct("<4s8xII2x")
_CHUNK_BYTES = 2**20


def read_arrays(file: BinaryIO, forms: Mapping[str, tuple[str, int]], most_bytes: int) -> dict[str, npt.NDArray[Any]]:
    """Read the arrays of a file that ``numpy.savez`` or ``numpy.savez_compressed`` has written.

    Args:
        file: The file.
        forms: Type and number of dimensions of each array, by name; there may be no others.
        most_bytes: How large all arrays together may be.

    Raises:
        ValueError: It is damaged, too large, or holds something else.
    """
    try:
        _check_directory(file)
        with zipfile.ZipFile(file) as archive:
            entries = {entry.filename: entry for entry in archive.infolist()}
            expected = {f"{name}.npy" for name in forms}
            if set(entries) != expected or len(archive.infolist()) != len(expected):
                found = ", ".join(sorted(entries))[:200]
                raise ValueError(f"expected {', '.join(sorted(expected))}, found {found}")
            total = sum(entry.file_size for entry in entries.values())
            if total > most_bytes:
                raise ValueError(f"{total} bytes of arrays, at most {most_bytes} are read")
            return {name: _array(archive, entries[f"{name}.npy"], name, *form) for name, form in forms.items()}
    except (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError) as error:
        raise ValueError(str(error)) from None


def _check_directory(file: BinaryIO) -> None:
    """Check that the list of what is in the file is short: ``zipfile`` reads all of it at once."""
    start = max(0, file.seek(0, 2) - _DIRECTORY_END.size)
    file.seek(start)
    signature, size, _ = _DIRECTORY_END.unpack(file.read())
    if signature != b"PK\5\6":
        raise ValueError("no end of a zip file")
    file.seek(max(0, start - 20))
    if size > _MOST_DIRECTORY_BYTES or file.read(4) == b"PK\6\7":
        raise ValueError("a list of too many files")


def _array(
    archive: zipfile.ZipFile, entry: zipfile.ZipInfo, name: str, dtype: str, dimensions: int
) -> npt.NDArray[Any]:
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(f"{name}: another compression than deflate")
    with archive.open(entry) as member:
        start = member.read(10)
        length = int.from_bytes(start[8:], "little")
        header = _HEADER.fullmatch(member.read(min(length, _MOST_HEADER_BYTES)))
        if start[:8] != b"\x93NUMPY\x01\x00" or header is None:
            raise ValueError(f"{name}: no array as NumPy writes it")
        found, shape = header[1].decode(), tuple(map(int, re.findall(rb"\d+", header[2])))
        if found != np.dtype(dtype).str or len(shape) != dimensions:
            raise ValueError(f"{name}: expected {dtype} in {dimensions} dimensions, found {found} of shape {shape}")
        if len(start) + length + math.prod(shape) * np.dtype(dtype).itemsize != entry.file_size:
            raise ValueError(f"{name}: shape {shape} does not fit its {entry.file_size} bytes")
        array = np.empty(shape, dtype)
        raw = array.reshape(-1).view(np.uint8)
        for place in range(0, len(raw), _CHUNK_BYTES):
            part = raw[place : place + _CHUNK_BYTES]
            part[:] = np.frombuffer(member.read(len(part)), np.uint8)
    return array
