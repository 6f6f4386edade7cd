"""Archives of arrays that declare what they do not hold, or cost more than they may."""

import contextlib
import io
import zipfile

import numpy as np
import pytest

from perseus_ds.artifacts.certificates import read_arrays

FORMS = {"a": ("int64", 1), "b": ("float64", 2), "c": ("int64", 0)}
RIGHT = {"a": np.arange(3), "b": np.ones((2, 0)), "c": np.int64(7)}


def archive(compression=zipfile.ZIP_DEFLATED, **members):
    """Return an archive of the right arrays, but for those that are given as bytes."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", compression) as file:
        for name, array in RIGHT.items():
            content = io.BytesIO()
            np.save(content, array)
            file.writestr(f"{name}.npy", members.get(name, content.getvalue()))
    return data.getvalue()


def member(header, content=b"\0" * 24):
    text = header.encode("latin1")
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + content


def form(shape, descr="<i8", order="False", more=""):
    return f"{{'descr': '{descr}', 'fortran_order': {order}, 'shape': ({shape}), {more}}}\n"


def read(content, most_bytes=10_000):
    return read_arrays(io.BytesIO(content), FORMS, most_bytes)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_numpy_writes_is_read(compression):
    for array, expected in zip(read(archive(compression)).values(), RIGHT.values(), strict=True):
        assert array.dtype == np.asarray(expected).dtype
        assert np.array_equal(array, expected)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<i8', 'fortran_order': False, 'shape': (",
        "{1:2,'a':3}",
        "(" * 900 + ")" * 900,
        "",
        form("3,", more="'x': 1, "),
        form("-3,"),
        form("999999999999,"),
        form("3,", descr="(9999)f8"),
    ],
)
def test_a_header_that_numpy_does_not_write_is_refused(header):
    with pytest.raises(ValueError):  # noqa: PT011 - NumPy says what is wrong
        read(archive(a=member(header)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (member(form("3,", descr=">i8")), "a: expected int64 in 1 dimensions, found >i8 of shape"),
        (member(form("1300,"), b"\0" * 10_400), r"\d+ bytes of arrays, at most 10000 are read"),
    ],
)
def test_an_array_of_another_form_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        read(archive(a=content))


def test_an_archive_of_other_files_is_refused():
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for number in range(2000):
            file.writestr(str(number), b"")
    with pytest.raises(ValueError, match="expected a, b, c, found 2000 others"):
        read(data.getvalue())


def test_every_changed_byte_is_refused_or_harmless():
    content = archive()
    for place in range(len(content)):
        for value in (0, 0x28, 0xFF):
            with contextlib.suppress(ValueError):
                read(content[:place] + bytes([value]) + content[place + 1 :])
