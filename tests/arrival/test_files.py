"""Files: where a matrix's bytes lie, what is refused, and a reader that never writes again what it has delivered."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.arrival import files
from tilestream.arrival.files import PAGE, RangeReader, StoredMatrix, drop_from_page_cache, find_matrix

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.torch")


def raw_safetensors(path, header, data=b"", text=None):
    encoded = json.dumps(header).encode() if text is None else text
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def tensors():
    torch.manual_seed(3)
    return {
        "bias": torch.randn(7),
        "ids": torch.arange(13, dtype=torch.uint8).view(13, 1),
        "x": torch.randn(33, 5, dtype=torch.bfloat16),
        "y": torch.randn(3, 4, 6, dtype=torch.float64),
        "z": torch.randn(17, 3, dtype=torch.float16),
        "w": torch.randn(9, 11),
        "scalar": torch.tensor(2.0),
    }


class TestSafetensors:
    def test_every_tensor_is_found_where_the_library_wrote_it(self, tmp_path, tensors):
        path = tmp_path / "all.safetensors"
        safetensors.save_file(tensors, path, metadata={"format": "pt"})
        content = path.read_bytes()
        for name in "xyzw":
            found = find_matrix(path, name)
            assert (found.name, found.shape) == (name, tuple(tensors[name].shape))
            assert found.dtype == str(tensors[name].dtype).removeprefix("torch.")
            assert found.nbytes == tensors[name].numel() * found.itemsize
            assert content[found.offset : found.offset + found.nbytes] == bytes_of(tensors[name])

    def test_the_only_matrix_needs_no_name(self, tmp_path, tensors):
        safetensors.save_file({name: tensors[name] for name in ("bias", "x", "scalar")}, tmp_path / "one.safetensors")
        assert find_matrix(tmp_path / "one.safetensors").name == "x"
        assert find_matrix(str(tmp_path / "one.safetensors")).name == "x"

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            (None, ValueError, "holds 5 matrices; say which: bias [7], ids [13, 1], scalar [], w [9, 11], x [33, 5], y [3, 4, 6], z [17, 3]"),
            ("v", ValueError, "no tensor 'v'; there are bias [7], ids [13, 1], scalar [], w [9, 11], x [33, 5], y [3, 4, 6], z [17, 3]"),
            ("bias", ValueError, "tensor 'bias' has shape [7]; a matrix has at least 2 dimensions"),
            ("scalar", ValueError, "tensor 'scalar' has shape []; a matrix has at least 2 dimensions"),
            ("ids", TypeError, "tensor 'ids' has dtype U8; a matmul takes F64, F32, F16, BF16, F8_E4M3, F8_E5M2"),
            ("__metadata__", ValueError, "no tensor '__metadata__'; there are bias"),
        ],
    )  # fmt: skip
    def test_what_is_no_matrix_of_the_file_is_refused(self, tmp_path, tensors, name, error, message):
        path = tmp_path / "all.safetensors"
        safetensors.save_file(tensors, path, metadata={"format": "pt"})
        with pytest.raises(error, match=f"^{re.escape(f'{path}: {message}')}"):
            find_matrix(path, name)

    def test_a_list_of_many_tensors_is_cut_short(self, tmp_path):
        path = tmp_path / "many.safetensors"
        safetensors.save_file({f"t{i:02}": torch.zeros(1, 1) for i in range(40)}, path)
        with pytest.raises(
            ValueError, match=r"holds 40 matrices; say which: t00 \[1, 1\], .* t11 \[1, 1\] and 28 more$"
        ):
            find_matrix(path)

    GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}  # noqa: RUF012

    def test_the_hand_written_header_is_good_as_it_is(self, tmp_path):
        assert find_matrix(raw_safetensors(tmp_path / "x", {"a": self.GOOD}, bytes(16))).shape == (2, 2)

    @pytest.mark.parametrize(
        ("header", "text", "message"),
        [
            (None, b"", "not a safetensors file: its header cannot be read"),
            (None, b'{"a": ', "not a safetensors file: its header cannot be read"),
            (None, b"\xff\xfe{}", "not a safetensors file: its header cannot be read"),
            ([1], None, "not a safetensors file: its header cannot be read"),
            ({"a": 3}, None, "not a safetensors file: its header cannot be read"),
            ({"a": {"dtype": "F32"}}, None, "not a safetensors file: its header cannot be read"),
            ({"a": GOOD | {"shape": None}}, None, "not a safetensors file: its header cannot be read"),
            ({"a": GOOD | {"shape": ["x", 2]}}, None, "not a safetensors file: its header cannot be read"),
            ({"a": GOOD | {"data_offsets": [0, 12]}}, None, "tensor 'a' of shape [2, 2] has 12 bytes, not 16"),
            ({"a": GOOD | {"shape": [2, 3]}}, None, "tensor 'a' of shape [2, 3] has 16 bytes, not 24"),
            ({"a": GOOD | {"data_offsets": [16, 32]}}, None, "tensor 'a' should end at byte"),
            ({}, None, "holds 0 matrices; say which: "),
        ],
    )
    def test_a_damaged_header_is_refused(self, tmp_path, header, text, message):
        path = raw_safetensors(tmp_path / "x", header, bytes(16), text)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}"):
            find_matrix(path)

    @pytest.mark.parametrize(
        "entry",
        [
            {"shape": [2, 2], "data_offsets": [0, 16]},
            {"shape": [2, 2], "dtype": "F32"},
            GOOD | {"dtype": ["F32"]},
            GOOD | {"data_offsets": [0, 8, 16]},
            GOOD | {"data_offsets": ["0", "16"]},
            GOOD | {"data_offsets": [0.0, 16.0]},
            GOOD | {"data_offsets": [-16, 0]},
            GOOD | {"shape": [-2, -2]},
        ],
        ids=["no dtype", "no offsets", "odd dtype", "three offsets", "text", "floats", "before the data", "negative shape"],
    )  # fmt: skip
    def test_a_damaged_entry_is_refused(self, tmp_path, entry):
        path = raw_safetensors(tmp_path / "x", {"a": entry}, bytes(16))
        with pytest.raises(
            ValueError, match=f"^{re.escape(f'{path}: not a safetensors file: its header cannot be read (')}"
        ):
            find_matrix(path, "a")

    @pytest.mark.parametrize("cut", range(1, 16, 5))
    def test_a_file_that_is_cut_off_is_refused(self, tmp_path, cut):
        path = raw_safetensors(tmp_path / "x", {"a": self.GOOD}, bytes(16))
        size = path.stat().st_size
        os.truncate(path, size - cut)
        message = f"{path}: tensor 'a' should end at byte {size}, the file has {size - cut}: it is cut off"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            find_matrix(path)

    @pytest.mark.parametrize(
        "content", [b"", b"abc", b"\0" * 7, b"a text of some length, not a tensor", b"PK\x03\x04" * 9]
    )
    def test_what_is_no_tensor_file_is_refused(self, tmp_path, content):
        path = tmp_path / "x"
        path.write_bytes(content)
        message = f"{path}: neither a safetensors nor a .npy file (it begins with {content[:8]!r})"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            find_matrix(path)

    def test_no_file(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"nowhere\.npy"):
            find_matrix(tmp_path / "nowhere.npy")


class TestNpy:
    def save(self, path, array, version=None):
        with path.open("wb") as file:
            np.lib.format.write_array(file, array, version=version)
        return path

    @pytest.mark.parametrize("version", [(1, 0), (2, 0)])
    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
    def test_versions_and_dtypes(self, tmp_path, version, dtype):
        array = np.arange(30, dtype=dtype).reshape(5, 6)
        path = self.save(tmp_path / "a.npy", array, version)
        found = find_matrix(path)
        assert (found.name, found.shape, found.itemsize) == ("a", (5, 6), int(dtype[1]))
        assert found.dtype == {"f2": "float16", "f4": "float32", "f8": "float64"}[dtype]
        assert path.read_bytes()[found.offset :] == array.tobytes()

    @pytest.mark.parametrize(
        ("array", "version", "error", "message"),
        [
            (np.zeros((2, 2), "f4"), (3, 0), ValueError, "not a .npy file that can be read (version (3, 0); versions 1.0 and 2.0 are read)"),
            (np.zeros((2, 3), "f4", order="F"), None, ValueError, "column-major; rows arrive from a row-major array: np.save(numpy.ascontiguousarray(x))"),
            (np.zeros((2, 2), "i4"), None, TypeError, "dtype <i4; a matmul takes <f8, <f4, <f2"),
            (np.zeros((2, 2), ">f4"), None, TypeError, "dtype >f4; a matmul takes <f8, <f4, <f2"),
            (np.zeros((2, 2), "c8"), None, TypeError, "dtype <c8; a matmul takes <f8, <f4, <f2"),
            (np.zeros((2, 2), [("a", "f4")]), None, TypeError, "dtype |V4; a matmul takes <f8, <f4, <f2"),
            (np.zeros((2, 2), "O"), None, TypeError, "dtype |O; a matmul takes <f8, <f4, <f2"),
            (np.zeros(4, "f4"), None, ValueError, "tensor 'a' has shape [4]; a matrix has at least 2 dimensions"),
        ],
    )  # fmt: skip
    def test_what_does_not_stream_is_refused(self, tmp_path, array, version, error, message):
        path = self.save(tmp_path / "a.npy", array, version)
        with pytest.raises(error, match=f"^{re.escape(f'{path}: {message}')}$"):
            find_matrix(path)

    def test_a_name_means_nothing(self, tmp_path):
        path = self.save(tmp_path / "a.npy", np.zeros((2, 2), "f4"))
        with pytest.raises(
            ValueError, match=re.escape(f"{path}: tensor='x'; a .npy file holds one array without a name")
        ):
            find_matrix(path, "x")

    def test_cut_off_in_its_data(self, tmp_path):
        path = self.save(tmp_path / "a.npy", np.zeros((3, 4), "f4"))
        os.truncate(path, 130)
        with pytest.raises(ValueError, match=re.escape(f"{path}: tensor 'a' should end at byte 176, the file has 130: it is cut off")):  # fmt: skip
            find_matrix(path)

    @pytest.mark.parametrize("size", [6, 7, 8, 9, 20, 100])
    def test_cut_off_in_its_header(self, tmp_path, size):
        path = self.save(tmp_path / "a.npy", np.zeros((3, 4), "f4"))
        os.truncate(path, size)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: not a .npy file that can be read (')}EOF"):
            find_matrix(path)

    @pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00\x10", b"\x93NUMPY\x01\x00\x10\x00" + b"{garbage" * 10], ids=["cut off", "garbage"])  # fmt: skip
    def test_a_damaged_header_is_refused_by_name(self, tmp_path, content):
        path = tmp_path / "a.npy"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: not a .npy file that can be read (')}"):
            find_matrix(path)


# Reading --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Five pages and a bit of random bytes, at an offset that is no page's; more bytes behind them."""
    path = tmp_path_factory.mktemp("stored") / "x"
    content = random.Random(5).randbytes(1000 + 5 * PAGE + 777 + 300)
    path.write_bytes(content)
    matrix = StoredMatrix(path, "x", (5 * PAGE + 777, 1), "uint8", 1, 1000)
    return matrix, content[1000 : 1000 + matrix.nbytes]


def direct_works(matrix: StoredMatrix) -> bool:
    reader = RangeReader(matrix)
    try:
        reader.read(0, matrix.nbytes)
        return "O_DIRECT:" in reader.how
    finally:
        reader.close()


@pytest.fixture(params=["direct", "buffered"], scope="module")
def direct(request, stored):
    if request.param == "direct" and not direct_works(stored[0]):
        pytest.skip("the file system has no O_DIRECT")
    return request.param == "direct"


@st.composite
def cuts(draw, nbytes: int):
    """Ranges that divide [0, nbytes): single bytes inside a page, ends on pages and beside them, or anywhere."""
    near = st.integers(0, nbytes // PAGE + 1).flatmap(
        lambda page: st.integers(-1030, 1030).map(lambda d: page * PAGE + d)
    )
    tiny = st.integers(0, nbytes).flatmap(lambda begin: st.lists(st.integers(begin, begin + 9), max_size=6))
    points = draw(st.lists(near | st.integers(0, nbytes), max_size=12)) + draw(tiny)
    inner = sorted({min(max(point, 0), nbytes) for point in points} | {0, nbytes})
    return list(itertools.pairwise(inner))


class TestRangeReader:
    def test_the_whole_in_one(self, stored, direct):
        matrix, content = stored
        reader = RangeReader(matrix, direct)
        reader.read(0, matrix.nbytes)
        assert bytes(reader.data) == content
        assert reader.how.startswith("O_DIRECT:" if direct else "through the page cache (asked to)")
        reader.close()

    @given(st.data())
    @settings(max_examples=100)
    def test_any_ranges_from_any_pivot_give_the_same_bytes_and_none_is_written_twice(self, stored, direct, data):
        matrix, content = stored
        ranges = data.draw(cuts(matrix.nbytes))
        pivot = data.draw(st.integers(0, len(ranges) - 1))
        reader = RangeReader(matrix, direct)
        for begin, end in ranges[pivot:] + ranges[:pivot]:
            reader.read(begin, end)
            assert bytes(reader.data[begin:end]) == content[begin:end], "asked for, and there"
            reader.data[begin:end] = b"\xa5" * (end - begin)  # whoever was told may be at it: it must not change again
        assert bytes(reader.data) == b"\xa5" * matrix.nbytes
        reader.close()

    @given(st.data())
    @settings(max_examples=100)
    def test_claims_in_order_may_be_read_in_any_order(self, stored, direct, data):
        matrix, content = stored
        ranges = data.draw(cuts(matrix.nbytes))
        pivot = data.draw(st.integers(0, len(ranges) - 1))
        reader = RangeReader(matrix, direct)
        jobs = [reader.claim(*each) for each in ranges[pivot:] + ranges[:pivot]]
        for job in data.draw(st.permutations(jobs)):
            job()
        assert bytes(reader.data) == content
        reader.close()

    def test_one_byte_at_a_time_inside_a_page(self, stored, direct):
        matrix, content = stored
        reader = RangeReader(matrix, direct)
        for at in range(40):
            reader.read(at, at + 1)
        assert bytes(reader.data[:40]) == content[:40]
        reader.close()

    def test_an_empty_range_reads_nothing(self, stored, monkeypatch):
        reader = RangeReader(stored[0], False)
        monkeypatch.setattr(os, "preadv", None)
        reader.read(17, 17)
        reader.close()

    def test_again_reads_anew_also_after_close(self, stored, direct):
        matrix, content = stored
        reader = RangeReader(matrix, direct)
        how = reader.how
        for closed in (False, True):
            reader.read(0, matrix.nbytes)
            reader.data[:] = bytes(matrix.nbytes)
            if closed:
                reader.close()
            reader.again()
            assert how.startswith("O_DIRECT:") == reader.how.startswith("O_DIRECT:")
        reader.read(0, matrix.nbytes)
        assert bytes(reader.data) == content
        reader.close()

    def test_close_leaves_no_descriptor_and_what_was_read(self, stored, direct):
        matrix, content = stored
        before = len(list(Path("/proc/self/fd").iterdir()))
        reader = RangeReader(matrix, direct)
        reader.read(0, matrix.nbytes)
        reader.close()
        reader.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert bytes(reader.data) == content

    def test_a_matrix_of_no_bytes(self, tmp_path):
        path = tmp_path / "empty"
        path.write_bytes(b"x")
        reader = RangeReader(StoredMatrix(path, "x", (0, 4), "float32", 4, 1))
        reader.read(0, 0)
        assert len(reader.data) == 0
        reader.close()

    def test_a_file_that_became_shorter_is_an_error(self, tmp_path):
        path = tmp_path / "x"
        path.write_bytes(bytes(3 * PAGE))
        reader = RangeReader(StoredMatrix(path, "x", (3 * PAGE, 1), "uint8", 1, 0), False)
        os.truncate(path, PAGE + 100)
        with pytest.raises(
            EOFError, match=re.escape(f"{path}: ends at byte {PAGE + 100}, {2 * PAGE - 100} bytes early")
        ):
            reader.read(0, 3 * PAGE)
        reader.close()

    def test_a_file_that_became_shorter_is_an_error_past_the_cache_too(self, tmp_path, monkeypatch):
        path = tmp_path / "x"
        path.write_bytes(bytes(3 * PAGE))
        matrix = StoredMatrix(path, "x", (3 * PAGE, 1), "uint8", 1, 0)
        if not direct_works(matrix):
            pytest.skip("the file system has no O_DIRECT")
        reader = RangeReader(matrix)
        os.truncate(path, PAGE + 100)
        calls, preadv = [], os.preadv

        def bounded(*arguments):
            calls.append(arguments)
            if len(calls) > 100:
                raise TimeoutError("read in circles")
            return preadv(*arguments)

        monkeypatch.setattr(files.os, "preadv", bounded)
        try:
            with pytest.raises(EOFError, match="bytes early"):
                reader.read(0, 3 * PAGE)
        finally:
            reader.close()

    @pytest.mark.parametrize("most", [1, 100, PAGE - 1, PAGE, PAGE + 1])
    def test_short_reads_go_on(self, stored, monkeypatch, most):
        matrix, content = stored
        preadv = os.preadv
        monkeypatch.setattr(files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:most]], at))
        reader = RangeReader(matrix, False)
        reader.read(0, matrix.nbytes)
        assert bytes(reader.data) == content
        reader.close()

    def test_a_short_read_does_not_leave_a_shared_page_half_read(self, stored, monkeypatch):
        matrix, content = stored
        preadv = os.preadv
        monkeypatch.setattr(files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:2000]], at))
        reader = RangeReader(matrix, False)
        reader.read(0, 900)  # bytes 1000 to 1900 of the page: the read returns the first 2000
        reader.read(900, matrix.nbytes)
        assert bytes(reader.data) == content
        reader.close()

    def test_a_file_system_that_refuses_o_direct_is_read_through_the_cache(self, stored, monkeypatch):
        matrix, content = stored
        really = os.open

        def refuse(path, flags, *rest):
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "no")
            return really(path, flags, *rest)

        monkeypatch.setattr(files.os, "open", refuse)
        reader = RangeReader(matrix)
        reader.read(0, matrix.nbytes)
        assert bytes(reader.data) == content
        assert reader.how == "through the page cache (O_DIRECT refused by the file system: EINVAL)"
        reader.close()

    def test_a_file_system_that_takes_o_direct_and_refuses_the_read(self, stored, monkeypatch):
        matrix, content = stored
        if not direct_works(matrix):
            pytest.skip("the file system has no O_DIRECT")
        preadv, refused = os.preadv, []

        def refuse(fd, views, at):
            if not refused:
                refused.append(fd)
                raise OSError(errno.EINVAL, "no")
            return preadv(fd, views, at)

        reader = RangeReader(matrix)
        monkeypatch.setattr(files.os, "preadv", refuse)
        reader.read(0, matrix.nbytes)
        assert bytes(reader.data) == content
        assert "took O_DIRECT and then refused the read" in reader.how
        reader.close()

    def test_any_other_error_of_the_disk_is_raised(self, stored, direct, monkeypatch):
        def fail(fd, views, at):
            raise OSError(errno.EIO, "disk")

        reader = RangeReader(stored[0], direct)
        monkeypatch.setattr(files.os, "preadv", fail)
        with pytest.raises(OSError, match="disk"):
            reader.read(0, 10)
        reader.close()


class TestAWrongReaderIsFound:
    def test_one_that_forgets_the_pages_it_has_read(self, stored, monkeypatch):
        reader = RangeReader(stored[0], False)
        reader.read(0, 10)
        reader.data[0:10] = b"\xa5" * 10
        reader._whole.clear()
        reader.read(10, 20)
        assert bytes(reader.data[0:10]) != b"\xa5" * 10
        reader.close()


def test_dropping_from_the_page_cache_keeps_the_content(stored):
    matrix, content = stored
    assert drop_from_page_cache(matrix.path) is hasattr(os, "posix_fadvise")
    assert matrix.path.read_bytes()[1000 : 1000 + matrix.nbytes] == content
