"""Files: where a matrix's bytes lie, what is refused, and a reader that never writes again what it has delivered."""

# ruff: noqa: E501  (tables of messages: each in one piece, so that it can be searched for)

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.arrival import files
from tilestream.arrival.files import PAGE, RangeReader, StoredMatrix, drop_from_page_cache, find_matrix

np = pytest.importorskip("numpy")
safetensors = pytest.importorskip("safetensors.torch")


def raw_safetensors(path, header, data=bytes(16), text=None):
    encoded = json.dumps(header).encode() if text is None else text
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def refused(error, path, message, end="$"):
    return pytest.raises(error, match=f"^{re.escape(f'{path}: {message}')}{end}")


ALL = "bias [7], ids [13, 1], scalar [], w [9, 11], x [33, 5], y [3, 4, 6], z [17, 3]"
HEADER = "not a safetensors file: its header cannot be read"
GOOD = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}
FEW = "a matrix has at least 2 dimensions"


class TestSafetensors:
    @pytest.fixture
    def tensors(self):
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

    @pytest.fixture
    def path(self, tmp_path, tensors):
        safetensors.save_file(tensors, tmp_path / "all.safetensors", metadata={"format": "pt"})
        return tmp_path / "all.safetensors"

    def test_every_tensor_is_found_where_the_library_wrote_it(self, path, tensors):
        content = path.read_bytes()
        for name in "xyzw":
            found = find_matrix(path, name)
            assert (found.name, found.shape) == (name, tuple(tensors[name].shape))
            assert found.dtype == str(tensors[name].dtype).removeprefix("torch.")
            assert found.nbytes == tensors[name].numel() * found.itemsize
            assert content[found.offset : found.offset + found.nbytes] == bytes_of(tensors[name])

    def test_the_only_matrix_needs_no_name(self, tmp_path, tensors):
        path = tmp_path / "one.safetensors"
        safetensors.save_file({name: tensors[name] for name in ("bias", "x", "scalar")}, path)
        assert find_matrix(path).name == find_matrix(str(path)).name == "x"

    @pytest.mark.parametrize(
        ("name", "error", "message"),
        [
            (None, ValueError, f"holds 5 matrices; say which: {ALL}"),
            ("v", ValueError, f"no tensor 'v'; there are {ALL}"),
            ("bias", ValueError, f"tensor 'bias' has shape [7]; {FEW}"),
            ("scalar", ValueError, f"tensor 'scalar' has shape []; {FEW}"),
            ("ids", TypeError, "tensor 'ids' has dtype U8; a matmul takes F64, F32, F16, BF16, F8_E4M3, F8_E5M2"),
            ("__metadata__", ValueError, f"no tensor '__metadata__'; there are {ALL}"),
        ],
    )
    def test_what_is_no_matrix_of_the_file_is_refused(self, path, name, error, message):
        with refused(error, path, message):
            find_matrix(path, name)

    def test_a_list_of_many_tensors_is_cut_short(self, tmp_path):
        path = tmp_path / "many.safetensors"
        safetensors.save_file({f"t{i:02}": torch.zeros(1, 1) for i in range(40)}, path)
        with refused(ValueError, path, "holds 40 matrices; say which: t00 [1, 1], ", r".* t11 \[1, 1\] and 28 more$"):
            find_matrix(path)

    def test_the_hand_written_header_is_good_as_it_is(self, tmp_path):
        assert find_matrix(raw_safetensors(tmp_path / "x", {"a": GOOD})).shape == (2, 2)

    @pytest.mark.parametrize(
        ("header", "text", "message"),
        [
            (None, b"", HEADER), (None, b'{"a": ', HEADER), (None, b"\xff\xfe{}", HEADER), ([1], None, HEADER),
            ({"a": 3}, None, HEADER), ({"a": {"dtype": "F32"}}, None, HEADER),
            ({"a": {"shape": [2, 2], "data_offsets": [0, 16]}}, None, HEADER),
            ({"a": {"shape": [2, 2], "dtype": "F32"}}, None, HEADER),
            *(
                ({"a": GOOD | changed}, None, HEADER)
                for changed in (
                    {"shape": None}, {"shape": ["x", 2]}, {"shape": [-2, -2]}, {"dtype": ["F32"]},
                    {"data_offsets": [0, 8, 16]}, {"data_offsets": ["0", "16"]}, {"data_offsets": [0.0, 16.0]},
                    {"data_offsets": [-16, 0]},
                )
            ),
            ({"a": GOOD | {"data_offsets": [0, 12]}}, None, "tensor 'a' of shape [2, 2] has 12 bytes, not 16"),
            ({"a": GOOD | {"shape": [2, 3]}}, None, "tensor 'a' of shape [2, 3] has 16 bytes, not 24"),
            ({"a": GOOD | {"data_offsets": [16, 32]}}, None, "tensor 'a' should end at byte"),
            ({}, None, "holds 0 matrices; say which: "),
        ],
    )  # fmt: skip
    def test_a_damaged_header_is_refused(self, tmp_path, header, text, message):
        path = raw_safetensors(tmp_path / "x", header, text=text)
        for name in (None, "a") if message == HEADER else (None,):
            with refused(ValueError, path, message, ""):
                find_matrix(path, name)

    @pytest.mark.parametrize("cut", range(1, 16, 5))
    def test_a_file_that_is_cut_off_is_refused(self, tmp_path, cut):
        path = raw_safetensors(tmp_path / "x", {"a": GOOD})
        size = path.stat().st_size
        os.truncate(path, size - cut)
        message = f"tensor 'a' should end at byte {size}, the file has {size - cut}: it is cut off"
        with refused(ValueError, path, message):
            find_matrix(path)

    def test_what_is_no_tensor_file_is_refused(self, tmp_path):
        path = tmp_path / "x"
        for content in (b"", b"abc", b"\0" * 7, b"a text of some length, not a tensor", b"PK\x03\x04" * 9):
            path.write_bytes(content)
            message = f"neither a safetensors nor a .npy file (it begins with {content[:8]!r})"
            with refused(ValueError, path, message):
                find_matrix(path)
        with pytest.raises(FileNotFoundError, match=r"nowhere\.npy"):
            find_matrix(tmp_path / "nowhere.npy")

    def test_what_is_no_regular_file_is_refused_at_once(self, tmp_path):
        with pytest.raises(IsADirectoryError):
            find_matrix(tmp_path)
        message = "no regular file; save it as one, or stream an iterable of its blocks: stream_in(blocks, shape=..., dtype=...)"
        others = [Path("/dev/zero")] if Path("/dev/zero").exists() else []
        if hasattr(os, "mkfifo"):
            os.mkfifo(tmp_path / "fifo")  # it has no writer: opened in the plain way, it would be waited for
            (tmp_path / "link").symlink_to(tmp_path / "fifo")
            others += [tmp_path / "fifo", tmp_path / "link"]
        for path in others:
            with refused(ValueError, path, message):
                find_matrix(path)

    @pytest.mark.parametrize("shape", [[2**63, 0], [0, 2**64], [2**40, 2**40, 0], [2**61, 0]])
    def test_a_shape_that_no_tensor_has_is_refused(self, tmp_path, shape):
        path = raw_safetensors(tmp_path / "x", {"a": GOOD | {"shape": shape, "data_offsets": [0, 0]}})
        message = f"tensor 'a' has shape {shape}; the strides of a tensor of that shape are 2^63 and more"
        with refused(ValueError, path, message):
            find_matrix(path)

    def test_the_largest_empty_shape_is_taken(self, tmp_path):
        path = raw_safetensors(tmp_path / "x", {"a": GOOD | {"shape": [2**60, 0], "data_offsets": [0, 0]}})
        assert torch.empty(find_matrix(path).shape, dtype=torch.float32).shape == (2**60, 0)


class TestNpy:
    UNREADABLE = "not a .npy file that can be read ("
    TAKES = "a matmul takes <f8, <f4, <f2"

    @pytest.fixture
    def save(self, tmp_path):
        """``save(array, version)``: the file."""

        def made(array, version=None):
            with (tmp_path / "a.npy").open("wb") as file:
                np.lib.format.write_array(file, array, version=version)
            return tmp_path / "a.npy"

        return made

    @pytest.mark.parametrize("version", [(1, 0), (2, 0)])
    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
    def test_versions_and_dtypes(self, save, version, dtype):
        array = np.arange(30, dtype=dtype).reshape(5, 6)
        path = save(array, version)
        found = find_matrix(path)
        assert (found.name, found.shape, found.itemsize) == ("a", (5, 6), int(dtype[1]))
        assert found.dtype == {"f2": "float16", "f4": "float32", "f8": "float64"}[dtype]
        assert path.read_bytes()[found.offset :] == array.tobytes()

    @pytest.mark.parametrize(
        ("array", "version", "error", "message"),
        [
            (np.zeros((2, 2), "f4"), (3, 0), ValueError, f"{UNREADABLE}version (3, 0); versions 1.0 and 2.0 are read)"),
            (np.zeros((2, 3), "f4", order="F"), None, ValueError, "column-major; rows arrive from a row-major array: np.save(numpy.ascontiguousarray(x))"),
            (np.zeros((2, 2), "i4"), None, TypeError, f"dtype <i4; {TAKES}"),
            (np.zeros((2, 2), ">f4"), None, TypeError, f"dtype >f4; {TAKES}"),
            (np.zeros((2, 2), "c8"), None, TypeError, f"dtype <c8; {TAKES}"),
            (np.zeros((2, 2), [("a", "f4")]), None, TypeError, f"dtype |V4; {TAKES}"),
            (np.zeros((2, 2), "O"), None, TypeError, f"dtype |O; {TAKES}"),
            (np.zeros(4, "f4"), None, ValueError, f"tensor 'a' has shape [4]; {FEW}"),
        ],
    )  # fmt: skip
    def test_what_does_not_stream_is_refused(self, save, array, version, error, message):
        path = save(array, version)
        with refused(error, path, message):
            find_matrix(path)

    def test_a_name_means_nothing(self, save):
        path = save(np.zeros((2, 2), "f4"))
        with refused(ValueError, path, "tensor='x'; a .npy file holds one array without a name"):
            find_matrix(path, "x")

    def test_cut_off(self, save):
        for size in (130, 100, 20, 9, 8, 7, 6):  # in its data, then in its header
            path = save(np.zeros((3, 4), "f4"))
            os.truncate(path, size)
            with (
                refused(ValueError, path, "tensor 'a' should end at byte 176, the file has 130: it is cut off")
                if size == 130
                else refused(ValueError, path, f"{self.UNREADABLE}EOF", "")
            ):
                find_matrix(path)

    @pytest.mark.parametrize("content", [b"\x93NUMPY\x01\x00\x10", b"\x93NUMPY\x01\x00\x10\x00" + b"{garbage" * 10], ids=["cut off", "garbage"])  # fmt: skip
    def test_a_damaged_header_is_refused_by_name(self, tmp_path, content):
        path = tmp_path / "a.npy"
        path.write_bytes(content)
        with refused(ValueError, path, self.UNREADABLE, ""):
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


@contextlib.contextmanager
def reading(matrix: StoredMatrix, direct: bool | None = None) -> Iterator[RangeReader]:
    with contextlib.closing(RangeReader(matrix, direct)) as reader:
        yield reader


def read(reader: RangeReader, begin: int = 0, end: int | None = None) -> None:
    reader.claim(begin, reader.matrix.nbytes if end is None else end)()


def read_and_check(reader: RangeReader, content: bytes) -> None:
    read(reader)
    assert bytes(reader.data) == content


def need_direct(matrix: StoredMatrix) -> None:
    with reading(matrix) as reader:
        read(reader)
        if "O_DIRECT:" not in reader.how:
            pytest.skip("the file system has no O_DIRECT")


@pytest.fixture(params=["direct", "buffered"], scope="module")
def direct(request, stored):
    if request.param == "direct":
        need_direct(stored[0])
    return request.param == "direct"


@st.composite
def cuts(draw, nbytes: int):
    """Ranges that divide [0, nbytes): single bytes inside a page, ends on pages and beside them, or anywhere.

    In order, from some range on and around.
    """
    near = st.integers(0, nbytes // PAGE + 1).flatmap(
        lambda page: st.integers(-1030, 1030).map(lambda d: page * PAGE + d)
    )
    tiny = st.integers(0, nbytes).flatmap(lambda begin: st.lists(st.integers(begin, begin + 9), max_size=6))
    points = draw(st.lists(near | st.integers(0, nbytes), max_size=12)) + draw(tiny)
    ranges = list(itertools.pairwise(sorted({min(max(point, 0), nbytes) for point in points} | {0, nbytes})))
    pivot = draw(st.integers(0, len(ranges) - 1))
    return ranges[pivot:] + ranges[:pivot]


class TestRangeReader:
    @given(st.data())
    @settings(max_examples=100)
    def test_any_ranges_from_any_pivot_give_the_same_bytes_and_none_is_written_twice(self, stored, direct, data):
        matrix, content = stored
        with reading(matrix, direct) as reader:
            for begin, end in data.draw(cuts(matrix.nbytes)):
                read(reader, begin, end)
                assert bytes(reader.data[begin:end]) == content[begin:end], "asked for, and there"
                reader.data[begin:end] = b"\xa5" * (end - begin)  # a reader may be at it: it must not change again
            assert bytes(reader.data) == b"\xa5" * matrix.nbytes

    @given(st.data())
    @settings(max_examples=100)
    def test_claims_in_order_may_be_read_in_any_order(self, stored, direct, data):
        matrix, content = stored
        with reading(matrix, direct) as reader:
            jobs = [reader.claim(*each) for each in data.draw(cuts(matrix.nbytes))]
            for job in data.draw(st.permutations(jobs)):
                job()
            assert bytes(reader.data) == content

    def test_an_empty_range_reads_nothing(self, stored, monkeypatch):
        with reading(stored[0], False) as reader:
            monkeypatch.setattr(os, "preadv", None)
            read(reader, 17, 17)

    def test_again_reads_anew_also_after_close_which_leaves_no_descriptor(self, stored, direct):
        matrix, content = stored
        before = len(list(Path("/proc/self/fd").iterdir()))
        with reading(matrix, direct) as reader:
            how = reader.how
            assert how.startswith("O_DIRECT:" if direct else "through the page cache (asked to)")
            for closed in (False, True):
                read_and_check(reader, content)
                reader.data[:] = bytes(matrix.nbytes)
                if closed:
                    reader.close()
                reader.again()
                assert reader.how == how
            read_and_check(reader, content)
            reader.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == before
        assert bytes(reader.data) == content

    def test_a_matrix_of_no_bytes(self, tmp_path):
        path = tmp_path / "empty"
        path.write_bytes(b"x")
        with reading(StoredMatrix(path, "x", (0, 4), "float32", 4, 1)) as reader:
            read(reader)
            assert len(reader.data) == 0

    @pytest.mark.parametrize("bypass", [False, True])
    def test_a_file_that_became_shorter_is_an_error(self, tmp_path, monkeypatch, bypass):
        path = tmp_path / "x"
        path.write_bytes(bytes(3 * PAGE))
        matrix = StoredMatrix(path, "x", (3 * PAGE, 1), "uint8", 1, 0)
        if bypass:
            need_direct(matrix)
        with reading(matrix, bypass or False) as reader:
            os.truncate(path, PAGE + 100)
            calls, preadv = [], os.preadv

            def bounded(*arguments):
                calls.append(arguments)
                assert len(calls) < 100, "reads in circles"
                return preadv(*arguments)

            monkeypatch.setattr(files.os, "preadv", bounded)
            with pytest.raises(EOFError) as caught:
                read(reader)
            message = str(caught.value)
            assert message.startswith(f"{path}: ends at byte ")
            assert message.endswith(" bytes early")
            assert reader.how.startswith("O_DIRECT:") is bypass, "each read begins at a page"
            assert bypass or message == f"{path}: ends at byte {PAGE + 100}, {2 * PAGE - 100} bytes early"

    @pytest.mark.parametrize("most", [1, 100, 2000, PAGE - 1, PAGE, PAGE + 1])
    def test_short_reads_go_on_and_leave_no_shared_page_half_read(self, stored, monkeypatch, most):
        matrix, content = stored
        preadv = os.preadv
        monkeypatch.setattr(files.os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:most]], at))
        for first in (0, 900):  # bytes 1000 to 1900 of the page: a read of 2000 bytes returns them, and some more
            with reading(matrix, False) as reader:
                read(reader, 0, first)
                read(reader, first)
                assert bytes(reader.data) == content

    def test_a_short_read_past_the_cache_goes_on_from_a_page(self, stored, monkeypatch):
        matrix, content = stored
        need_direct(matrix)
        preadv = os.preadv
        monkeypatch.setattr(files.os, "preadv", lambda *how: min(preadv(*how), PAGE + 100))
        with reading(matrix) as reader:
            read_and_check(reader, content)
            assert "O_DIRECT:" in reader.how

    def test_a_file_system_that_refuses_o_direct_is_read_through_the_cache(self, stored, monkeypatch):
        matrix, content = stored
        really = os.open

        def refuse(path, flags, *rest):
            if flags & getattr(os, "O_DIRECT", 0):
                raise OSError(errno.EINVAL, "no")
            return really(path, flags, *rest)

        monkeypatch.setattr(files.os, "open", refuse)
        with reading(matrix) as reader:
            read_and_check(reader, content)
            assert reader.how == "through the page cache (O_DIRECT refused by the file system: EINVAL)"

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
    def test_a_read_past_the_cache_that_fails(self, stored, monkeypatch, code):
        """EINVAL: the file system takes O_DIRECT and refuses the read. Anything else is the disk's error."""
        matrix, content = stored
        need_direct(matrix)
        preadv, failed = os.preadv, []

        def fail_once(fd, views, at):
            if not failed:
                failed.append(fd)
                raise OSError(code, "no")
            return preadv(fd, views, at)

        with reading(matrix) as reader:
            monkeypatch.setattr(files.os, "preadv", fail_once)
            if code == errno.EINVAL:
                read_and_check(reader, content)
                assert "took O_DIRECT and then refused the read" in reader.how
            else:
                with pytest.raises(OSError, match="no"):
                    read(reader)

    @pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
    def test_any_error_of_a_read_through_the_cache_is_raised(self, stored, monkeypatch, code):
        def fail(fd, views, at):
            raise OSError(code, "disk")

        with reading(stored[0], False) as reader:
            monkeypatch.setattr(files.os, "preadv", fail)
            with pytest.raises(OSError, match="disk"):
                read(reader, 0, 10)


def test_dropping_from_the_page_cache_keeps_the_content(stored):
    matrix, content = stored
    assert drop_from_page_cache(matrix.path) is hasattr(os, "posix_fadvise")
    assert matrix.path.read_bytes()[1000 : 1000 + matrix.nbytes] == content
