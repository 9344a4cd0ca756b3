"""Files that appear whole or not at all."""

from __future__ import annotations

import stat

import pytest

from tilestream.core import whole_file
from tilestream.core.whole_file import write_whole


def test_the_file_is_its_owners_and_nothing_is_beside_it(tmp_path):
    path = tmp_path / "x"
    for data in (b"first", b"", b"second"):
        write_whole(path, data)
        assert path.read_bytes() == data
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [one.name for one in tmp_path.iterdir()] == ["x"]


def test_what_cannot_be_written_leaves_the_old_file_alone(tmp_path, monkeypatch):
    path = tmp_path / "x"
    write_whole(path, b"old")
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"new")  # a file cannot take a folder's place
    with pytest.raises(TypeError):
        write_whole(path, "text")  # type: ignore[arg-type]

    def interrupted(*how):
        raise KeyboardInterrupt

    monkeypatch.setattr(whole_file.Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["folder", "x"]
