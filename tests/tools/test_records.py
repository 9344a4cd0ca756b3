"""Files of commands: whole or not at all. What `read` refuses is told in the tests of reports and of sweeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilestream_tools import records


def test_a_file_that_was_written_is_read(tmp_path):
    path = tmp_path / "a.json"
    records.write(path, '{"kind": "x", "schema": 1,\n "more": 2}\n')
    assert records.read(path, "x", 1, "record", "anew") == {"kind": "x", "schema": 1, "more": 2}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("fails", ["open", "replace"])
def test_a_refusal_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch, fails):
    path = tmp_path / "a.json"
    records.write(path, "old")

    def refuse(*how, **more):
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Path, fails, refuse)
        with pytest.raises(OSError, match="no space"):
            records.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
