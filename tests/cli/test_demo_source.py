import errno
import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from tilestream.cli.demo import source


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(source, "SHAPE", (96, 32))


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache" / "tilestream"


def test_the_file_is_written_once_and_then_taken_from_the_cache(folder):
    path, what = source.demo_file(folder)
    assert what == "written now"
    assert load_file(path)["x"].shape == (96, 32)
    before = path.stat().st_mtime_ns
    assert source.demo_file(folder) == (path, "cached")
    assert path.stat().st_mtime_ns == before
    assert list(folder.iterdir()) == [path], "no temporary file is left"


def test_the_file_is_the_same_each_time_and_normal(folder, tmp_path):
    x = load_file(source.demo_file(folder)[0])["x"]
    assert torch.equal(x, load_file(source.demo_file(tmp_path / "other")[0])["x"])
    assert abs(float(x.mean())) < 0.1
    assert 0.9 < float(x.std()) < 1.1


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def empty(path):
    path.write_bytes(b"")


def other_shape(path):
    save_file({"x": torch.zeros(96, 16)}, path)


def no_checksum(path):
    save_file({"x": torch.zeros(96, 32)}, path, metadata={"format_version": "1"})


def other_tensor(path):
    save_file({"y": torch.zeros(96, 32)}, path)


def longer(path):
    path.write_bytes(path.read_bytes() + b"more")


@pytest.mark.parametrize("damage", [cut, flip, empty, other_shape, no_checksum, other_tensor, longer])
def test_a_damaged_file_is_written_anew(folder, damage):
    path, _ = source.demo_file(folder)
    good = load_file(path)["x"].clone()
    damage(path)
    again, what = source.demo_file(folder)
    assert again == path
    assert what.startswith("written anew: the cached file was damaged (")
    assert torch.equal(load_file(path)["x"], good)
    assert source.demo_file(folder)[1] == "cached"
    assert list(folder.iterdir()) == [path]


def test_too_little_room_is_said_before_anything_is_written(folder, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 1000))
    with pytest.raises(OSError, match="--cache-dir") as raised:
        source.demo_file(folder)
    assert raised.value.errno == errno.ENOSPC
    assert not list(folder.iterdir())


def test_a_write_that_fails_leaves_nothing(folder, monkeypatch):
    def broken(*_, **__):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("safetensors.torch.save_file", broken)
    with pytest.raises(OSError, match="Input/output"):
        source.demo_file(folder)
    assert not list(folder.iterdir())


def test_two_at_once_do_not_disturb_each_other(folder):
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(source.demo_file(folder)[0])) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 4
    assert source.demo_file(folder)[1] == "cached"


@pytest.mark.parametrize(("value", "used"), [("/there", True), ("relative", False), ("", False)])
def test_the_cache_folder_follows_xdg(monkeypatch, tmp_path, value, used):
    monkeypatch.setenv("XDG_CACHE_HOME", value)
    monkeypatch.setenv("HOME", str(tmp_path))
    expected = "/there/tilestream" if used else str(tmp_path / ".cache" / "tilestream")
    assert str(source.default_folder()) == expected


def test_a_tensor_of_8_bits_is_refused(tmp_path):
    save_file({"x": torch.zeros(4, 8, dtype=torch.float8_e5m2)}, tmp_path / "f.safetensors")
    with pytest.raises(TypeError, match=r"f.safetensors: tensor 'x' is float8_e5m2; .* 16 bits or more: convert it"):
        source.open_source(tmp_path / "f.safetensors", "x")


def test_a_tensor_without_elements_is_refused(tmp_path):
    save_file({"x": torch.empty(0, 8)}, tmp_path / "f.safetensors")
    with pytest.raises(ValueError, match="nothing to read"):
        source.open_source(tmp_path / "f.safetensors", None)


def test_leading_dimensions_count_as_rows(tmp_path):
    save_file({"x": torch.zeros(3, 5, 8)}, tmp_path / "f.safetensors")
    found = source.open_source(tmp_path / "f.safetensors", "x")
    assert (found.rows, found.columns) == (15, 8)


def test_where_reads_cannot_be_made_cold_it_says_so(tmp_path, monkeypatch):
    save_file({"x": torch.zeros(8, 8)}, tmp_path / "f.safetensors")
    monkeypatch.setattr(source, "drop_from_page_cache", lambda path: False)
    found = source.open_source(tmp_path / "f.safetensors", None)
    assert not found.cold
    assert "posix_fadvise" in found.how


def test_a_file_that_stays_in_memory_is_not_called_cold(tmp_path, monkeypatch):
    save_file({"x": torch.zeros(8, 8)}, tmp_path / "f.safetensors")
    monkeypatch.setattr(source, "_cached", lambda path: True)
    found = source.open_source(tmp_path / "f.safetensors", None)
    assert not found.cold
    assert "memory" in found.how


def test_the_header_is_what_the_safetensors_library_wrote(folder):
    data = source.demo_file(folder)[0].read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert header["x"]["dtype"] == "F32"
    assert header["__metadata__"]["seed"] == str(source.SEED)
