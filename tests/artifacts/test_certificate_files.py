"""Damaged and oversized archives of certificates."""

import io
import zipfile

import numpy as np
import pytest
from pipelines import one_f_one_b, synthetic_profile

from perseus_ds.artifacts.certificates import Certificates
from perseus_ds.errors import FrontierError
from perseus_ds.optimizer import optimize


@pytest.fixture(scope="module")
def right():
    return optimize(
        one_f_one_b(2, 3), synthetic_profile(2), blocking_power_w=80.0, plans=4, certificates=True
    ).certificates


@pytest.fixture
def load(right, tmp_path):
    """Reads an archive with the right arrays, except for those given as bytes."""

    def of(compression=zipfile.ZIP_DEFLATED, **members):
        with (
            zipfile.ZipFile(io.BytesIO(right.to_bytes())) as old,
            zipfile.ZipFile(tmp_path / "certificates.npz", "w", compression) as new,
        ):
            for name in old.namelist():
                new.writestr(name, members.get(name.removesuffix(".npy"), old.read(name)))
        return Certificates.load(tmp_path)

    return of


def member(header, content=b"\0" * 24):
    text = header.encode("latin1")
    return b"\x93NUMPY\1\0" + len(text).to_bytes(2, "little") + text + content


def form(shape, descr="<f8", more=""):
    return f"{{'descr': '{descr}', 'fortran_order': False, 'shape': ({shape}), {more}}}\n"


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_what_numpy_writes_is_read(load, right, compression):
    found = load(compression)
    assert found.schedule == right.schedule
    for name in ("edge_flow_w", "source_flow_w", "mixed", "share"):
        assert np.array_equal(getattr(found, name), getattr(right, name))


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (",
        "(" * 900 + ")" * 900,
        form("3,", more="'x': 1, "),
        form("999999999999,"),
        form("3,", descr="(9999)f8"),
    ],
)
def test_a_header_that_numpy_does_not_write_is_refused(load, header):
    with pytest.raises(FrontierError, match="not a complete file of certificates"):
        load(share=member(header))


def test_an_array_of_another_form_is_refused(load, monkeypatch):
    with pytest.raises(FrontierError, match="share: expected float64 in 1 dimensions, found >f8 of shape"):
        load(share=member(form("3,", descr=">f8")))
    monkeypatch.setattr("perseus_ds.artifacts.certificates._MOST_BYTES", 100_000)
    with pytest.raises(FrontierError, match=r"\d+ bytes of arrays, at most 100000 are read"):
        load(share=member(form("13000,"), b"\0" * 104_000))


def test_an_archive_of_other_files_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "certificates.npz", "w") as file:
        for number in range(2000):
            file.writestr(str(number), b"")
    with pytest.raises(FrontierError, match=r"expected edge_flow_w, mixed, .*, found 2000 others"):
        Certificates.load(tmp_path)
