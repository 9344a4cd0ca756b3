"""This package's kernels in Triton's cache: listed, packed, and brought into another."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from triton.runtime.cache import FileCacheManager

from tilestream_tools.warm import kernel_cache

HOMES = ("A" * 8, "B" * 8)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of two kernels of this package, one of somebody else's, and one that is being written."""
    monkeypatch.setattr(kernel_cache.triton_cache, "triton_key", lambda: "this Triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for home, name, backend, arch in ((HOMES[0], "gemm", "cuda", 90), (HOMES[1], "attend", "hip", "gfx942")):
        put(home, name, {"target": {"backend": backend, "arch": arch}, "triton_version": "3.7.1"})
    put("C" * 8, "other", {"target": {"backend": "cuda", "arch": 90}, "triton_version": "3.7.1"}, "/other/kernels.py")
    put("D" * 8, "gemm", {})
    return tmp_path / "cache"


def put(home: str, name: str, metadata: dict, source: str = "/site-packages/tilestream/kernels/hopper/gemm.py") -> None:
    manager = FileCacheManager(home)
    texts = {f"{name}.source": f'loc("{source}":1:2)', f"{name}.cubin": "code", f"{name}.json": json.dumps(metadata)}
    manager.put_group(f"{name}.json", {one: manager.put(text, one) for one, text in texts.items()})


def test_kernels_of_this_package_are_listed(cache):
    found = list(kernel_cache.kernels())
    assert [(one.folder, one.name, one.arch, one.triton) for one in found] == [
        (cache / HOMES[0], "gemm", "sm_90", "3.7.1"), (cache / HOMES[1], "attend", "gfx942", "3.7.1")
    ]  # fmt: skip
    assert found[0].size == sum(path.stat().st_size for path in (cache / HOMES[0]).iterdir())


@pytest.mark.parametrize("name", ["pack", "deep/pack", "pack.tar", "pack.tar.gz", "pack.tgz"])
def test_a_pack_is_found_by_triton_in_another_cache(cache, tmp_path, monkeypatch, name):
    (tmp_path / "deep").mkdir()
    pack = tmp_path / name
    assert kernel_cache.pack(pack, kernel_cache.kernels()) == 2
    there = tmp_path / "there"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(there))
    assert kernel_cache.unpack(pack) == (2, 2)
    group = FileCacheManager(HOMES[0]).get_group("gemm.json")
    assert set(group) == {"gemm.source", "gemm.cubin", "gemm.json"}
    assert {Path(path).parent for path in group.values()} == {there / HOMES[0]}
    assert Path(group["gemm.cubin"]).read_text() == "code"
    assert [one.name for one in kernel_cache.kernels()] == ["gemm", "attend"]
    assert kernel_cache.unpack(pack) == (0, 2)


def test_a_pack_replaces_nothing(cache, tmp_path):
    for name in ("pack", "pack.tar"):
        kernel_cache.pack(tmp_path / name, kernel_cache.kernels())
        with pytest.raises(FileExistsError):
            kernel_cache.pack(tmp_path / name, ())


@pytest.mark.parametrize("what", ["tilestream", "triton", "python", "triton's files"])
def test_a_pack_of_other_versions_is_refused(cache, tmp_path, what):
    kernel_cache.pack(tmp_path / "pack", kernel_cache.kernels())
    manifest = tmp_path / "pack" / "tilestream.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {what: "another"}))
    with pytest.raises(ValueError, match=f"of {what} another, here .*Triton would find none of its kernels"):
        kernel_cache.unpack(tmp_path / "pack")


def test_what_is_no_pack_is_refused(cache, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty: no pack of kernels; `tilestream warm --to` makes one"):
        kernel_cache.unpack(tmp_path / "empty")
    (tmp_path / "text.tar").write_text("no tar")
    with pytest.raises(ValueError, match=r"text\.tar: neither a folder nor a tar"):
        kernel_cache.unpack(tmp_path / "text.tar")
    with pytest.raises(FileNotFoundError):
        kernel_cache.unpack(tmp_path / "nowhere.tar")


def spoil_code(pack):
    (pack / HOMES[0] / "gemm.cubin").write_text("c0de")


def lose_metadata(pack):
    (pack / HOMES[0] / "gemm.json").unlink()


def add_a_kernel(pack):
    (pack / HOMES[0] / "more.cubin").write_text("code")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (spoil_code, f"damaged: {HOMES[0]}/gemm.cubin: copy it again"),
        (lose_metadata, f"damaged: {HOMES[0]}/gemm.json: copy it again"),
        (add_a_kernel, "damaged: a file too many"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_a_damaged_pack_is_refused(cache, tmp_path, monkeypatch, damage, says):
    pack = tmp_path / "pack"
    kernel_cache.pack(pack, kernel_cache.kernels())
    damage(pack)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    with pytest.raises(ValueError, match=says):
        kernel_cache.unpack(pack)
    assert not (tmp_path / "there").exists()


def test_a_tar_that_was_cut_is_refused(cache, tmp_path):
    kernel_cache.pack(tmp_path / "pack.tgz", kernel_cache.kernels())
    whole = (tmp_path / "pack.tgz").read_bytes()
    (tmp_path / "cut.tgz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"cut\.tgz: neither a folder nor a tar"):
        kernel_cache.unpack(tmp_path / "cut.tgz")


@pytest.mark.parametrize("kind", ["gz", "bz2", "xz"])
def test_a_tar_whose_compressed_part_is_damaged_is_refused(cache, tmp_path, kind):
    kernel_cache.pack(tmp_path / "pack", kernel_cache.kernels())
    path = tmp_path / "pack.tgz"
    with tarfile.open(path, f"w:{kind}") as tar:
        tar.add(tmp_path / "pack", ".")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2 :] = bytes(len(whole) - len(whole) // 2)
    path.write_bytes(whole)
    # What is unpacked of the zeros may look like a tar's end, and then names, of which the archive's times decide.
    refused = r"pack\.tgz: (neither a folder nor a tar|no pack of kernels|damaged)"
    with pytest.raises(ValueError, match=refused):
        kernel_cache.unpack(path)


def test_a_pack_of_a_folder_that_is_no_kernels_is_refused(cache, tmp_path, monkeypatch):
    pack = tmp_path / "pack"
    kernel_cache.pack(pack, kernel_cache.kernels())
    (pack / HOMES[0] / "gemm.json").unlink()
    manifest = json.loads((pack / "tilestream.json").read_text())
    del manifest["files"][f"{HOMES[0]}/gemm.json"]
    (pack / "tilestream.json").write_text(json.dumps(manifest))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "there"))
    with pytest.raises(ValueError, match=f"damaged: {HOMES[0]} has no kernel's .json: copy it again"):
        kernel_cache.unpack(pack)
    assert not (tmp_path / "there").exists()


@pytest.mark.parametrize("files", [[1], 3, None])
def test_a_pack_whose_manifest_has_no_digests_is_refused(cache, tmp_path, files):
    kernel_cache.pack(tmp_path / "pack", kernel_cache.kernels())
    manifest = tmp_path / "pack" / "tilestream.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": files}))
    with pytest.raises(ValueError, match="pack: no pack of kernels"):
        kernel_cache.unpack(tmp_path / "pack")


@pytest.mark.parametrize("metadata", ["[]", '{"target": null}'])
def test_a_kernel_of_other_metadata_is_left_out(cache, metadata):
    (cache / HOMES[0] / "gemm.json").write_text(metadata)
    assert [one.name for one in kernel_cache.kernels()] == ["attend"]


@pytest.mark.parametrize("member", ["../evil.json", "/etc/evil.json", "AAAA/../../evil.json", "evil.json"])
def test_a_pack_writes_into_folders_of_kernels_only(cache, tmp_path, member):
    kernel_cache.pack(tmp_path / "pack.tar", kernel_cache.kernels())
    with tarfile.open(tmp_path / "pack.tar", "a") as tar:
        tar.add(__file__, member)
        found = tar.getnames()[-1]
    with pytest.raises(ValueError, match=f"'{found}' is no file of a kernel"):
        kernel_cache.unpack(tmp_path / "pack.tar")
    assert not list(tmp_path.rglob("evil.json"))


def test_a_kernel_is_cached_once_its_index_is_written(cache):
    home = kernel_cache.home("a key")
    assert home.parent == cache
    home.mkdir()
    (home / "gemm.json").write_text("{}")
    assert not kernel_cache.is_cached("a key")
    (home / "__grp__gemm.json").write_text("{}")
    assert kernel_cache.is_cached("a key")
