"""The cubin cache: what is found, what is never used, and that its errors cost only time."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from trainkernel.errors import OptionError
from trainkernel.runtime import build, cache
from trainkernel.runtime.cache import CubinCache, Entry, cache_key, pack_entry, unpack_entry

KEY = cache_key({"source": "a"})
OTHER = cache_key({"source": "b"})
CUBIN = bytes(range(256)) * 8


@pytest.fixture
def store(tmp_path: Path) -> CubinCache:
    return CubinCache(tmp_path / "cache")


def path_of(store: CubinCache, key: str = KEY) -> Path:
    path = store.path_of(key)
    assert path is not None
    return path


def test_stores_and_finds(store: CubinCache) -> None:
    assert store.get(KEY) is None
    assert store.put(KEY, CUBIN, {"arch": "sm_90"})
    assert store.get(KEY) == CUBIN
    assert store.get(OTHER) is None


def test_modes_are_private(store: CubinCache) -> None:
    store.put(KEY, CUBIN, {})
    path = path_of(store)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.parent.stat().st_mode & 0o777 == 0o700
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_key_depends_on_every_part() -> None:
    parts = {"trainkernel": "1", "nvrtc": "13.5", "arch": "sm_90", "options": "", "source": "x"}
    keys = {cache_key(parts)} | {cache_key({**parts, name: "changed"}) for name in parts}
    assert len(keys) == len(parts) + 1


def test_every_truncation_and_every_flipped_byte_is_a_miss() -> None:
    data = pack_entry(KEY, b"cubin", {"arch": "sm_90"})
    assert unpack_entry(KEY, data) == Entry({"arch": "sm_90", "key": KEY}, b"cubin")
    assert unpack_entry(OTHER, data) is None
    for size in range(len(data)):
        assert unpack_entry(KEY, data[:size]) is None
        flipped = bytearray(data)
        flipped[size] ^= 1
        assert unpack_entry(KEY, bytes(flipped)) is None
    assert unpack_entry(KEY, data + b"\0") is None


@pytest.mark.parametrize("content", [b"", b"not a cubin", b"TKCUBIN\0" + b"\xff" * 60])
def test_damaged_file_is_replaced(store: CubinCache, content: bytes) -> None:
    store.put(KEY, CUBIN, {})
    path_of(store).write_bytes(content)
    assert store.get(KEY) is None
    assert store.put(KEY, CUBIN, {})
    assert store.get(KEY) == CUBIN


def test_entry_under_another_name_is_a_miss(store: CubinCache) -> None:
    store.put(KEY, CUBIN, {})
    path_of(store, OTHER).parent.mkdir(mode=0o700, exist_ok=True)
    os.rename(path_of(store), path_of(store, OTHER))
    assert store.get(OTHER) is None


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
def test_folder_that_others_can_write_is_not_used(store: CubinCache, mode: int) -> None:
    store.put(KEY, CUBIN, {})
    for folder in (path_of(store).parent, path_of(store).parent.parent):
        folder.chmod(mode)
        assert store.get(KEY) is None
        assert not store.put(KEY, CUBIN, {})
        folder.chmod(0o700)
    assert store.get(KEY) == CUBIN


def test_file_that_others_can_write_is_not_used(store: CubinCache) -> None:
    store.put(KEY, CUBIN, {})
    path_of(store).chmod(0o620)
    assert store.get(KEY) is None


def test_another_owner_is_a_miss(store: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(KEY, CUBIN, {})
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert store.get(KEY) is None
    assert not store.put(KEY, CUBIN, {})


def test_symbolic_links_are_not_followed(store: CubinCache, tmp_path: Path) -> None:
    store.put(KEY, CUBIN, {})
    real = tmp_path / "elsewhere.tkc"
    os.rename(path_of(store), real)
    path_of(store).symlink_to(real)
    assert store.get(KEY) is None
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "cache", target_is_directory=True)
    assert not CubinCache(link).put(OTHER, CUBIN, {})


def test_fifo_in_place_of_an_entry_does_not_block(store: CubinCache) -> None:
    path_of(store).parent.mkdir(parents=True, mode=0o700)
    os.mkfifo(path_of(store), 0o600)
    assert store.get(KEY) is None


def test_a_huge_entry_is_not_read(store: CubinCache) -> None:
    store.put(KEY, CUBIN, {})
    with path_of(store).open("r+b") as file:
        file.truncate(1 << 40)  # sparse, and more than any memory
    assert store.get(KEY) is None
    assert store.put(KEY, CUBIN, {})
    assert store.get(KEY) == CUBIN


def test_deep_metadata_is_a_miss() -> None:
    text = b"[" * 100_000
    digest = hashlib.sha256(text + CUBIN).digest()
    data = cache._HEAD.pack(cache._MAGIC, cache.FORMAT_VERSION, len(text), len(CUBIN), digest) + text + CUBIN
    assert unpack_entry(KEY, data) is None


@pytest.mark.parametrize("name", ["open", "replace", "mkdir", "lstat", "fsync", "utime", "scandir"])
@pytest.mark.parametrize("error", [OSError(28, "disk full"), FileNotFoundError(2, "gone"), PermissionError(13, "no")])
def test_io_errors_cost_only_the_cache(
    store: CubinCache, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError
) -> None:
    store.put(OTHER, CUBIN, {})

    def fail(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, name, fail)
        store.put(KEY, CUBIN, {})
        assert store.get(OTHER) in (CUBIN, None)
    leftovers = list((store.directory or Path()).rglob("tmp-*"))
    assert leftovers == []
    assert store.get(OTHER) == CUBIN


def test_cache_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = CubinCache(tmp_path / "file")
    assert not store.put(KEY, CUBIN, {})
    assert store.get(KEY) is None


def test_size_bound_drops_the_least_recently_used(tmp_path: Path) -> None:
    keys = [cache_key({"source": str(index)}) for index in range(4)]
    size = len(pack_entry(keys[0], CUBIN, {}))
    store = CubinCache(tmp_path / "cache", max_bytes=3 * size)
    for age, key in enumerate(keys[:3]):
        store.put(key, CUBIN, {})
        os.utime(path_of(store, key), (1000 + age, 1000 + age))
    assert store.get(keys[0]) == CUBIN  # used: keys[1] is now the oldest
    store.put(keys[3], CUBIN, {})
    assert [store.get(key) is not None for key in keys] == [True, False, True, True]
    assert not CubinCache(tmp_path / "cache", max_bytes=size - 1).put(keys[1], CUBIN, {})


def test_one_bad_folder_does_not_end_the_size_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CubinCache(tmp_path / "cache", max_bytes=3 * len(pack_entry(KEY, CUBIN, {})))
    scandir = os.scandir

    def refusing(folder: str | Path) -> object:
        if os.path.basename(folder) == "zz":
            raise PermissionError(13, "no")
        return scandir(folder)

    store.put(KEY, CUBIN, {})
    (tmp_path / "cache" / "zz").mkdir()
    (path_of(store).parent / "folder.tkc").mkdir()  # cannot be removed, so it frees nothing
    os.utime(path_of(store).parent / "folder.tkc", (1, 1))
    monkeypatch.setattr(os, "scandir", refusing)
    for index in range(8):
        store.put(cache_key({"source": str(index)}), CUBIN, {})
    assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.tkc") if path.is_file()) <= store.max_bytes


def test_a_removed_working_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", "relative")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert not CubinCache.from_environment().put(KEY, CUBIN, {})


def test_stale_temporary_files_are_swept(store: CubinCache) -> None:
    store.put(KEY, CUBIN, {})
    stale, fresh = (path_of(store).parent / name for name in ("tmp-stale", "tmp-fresh"))
    for path in (stale, fresh):
        path.write_bytes(b"half")
    os.utime(stale, (time.time() - 7200,) * 2)
    store.put(OTHER, CUBIN, {})
    assert not stale.exists()
    assert fresh.exists()


def test_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINKERNEL_CACHE_DIR", str(tmp_path / "chosen"))
    assert cache.default_directory() == tmp_path / "chosen"
    monkeypatch.setenv("TRAINKERNEL_CACHE", "0")
    assert cache.default_directory() is None
    assert not CubinCache.from_environment().put(KEY, CUBIN, {})
    monkeypatch.delenv("TRAINKERNEL_CACHE")
    monkeypatch.delenv("TRAINKERNEL_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.default_directory() == tmp_path / "xdg" / "trainkernel"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache.default_directory() == tmp_path / "home" / ".cache" / "trainkernel"
    monkeypatch.setenv("TRAINKERNEL_CACHE_MAX_BYTES", "1000")
    assert CubinCache.from_environment().max_bytes == 1000
    for wrong in ("many", "-1", "1e6", "9" * 5000):
        monkeypatch.setenv("TRAINKERNEL_CACHE_MAX_BYTES", wrong)
        with pytest.raises(OptionError, match="TRAINKERNEL_CACHE_MAX_BYTES must be a number of bytes"):
            CubinCache.from_environment()


WRITER = """
import sys
from pathlib import Path
from trainkernel.runtime.cache import CubinCache, Entry, cache_key
store = CubinCache(Path(sys.argv[1]), max_bytes=60_000)
for turn in range(60):
    for item in range(8):
        key = cache_key({"source": str(item)})
        want = bytes([item]) * 10_000
        got = store.get(key)
        assert got is None or got == want, "another entry's bytes"
        store.put(key, want, {"writer": sys.argv[2]})
print("done")
"""


def test_concurrent_writers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "cache")]
    writers = [
        subprocess.Popen([*command, str(index)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for index in range(4)
    ]
    for writer in writers:
        out, err = writer.communicate(timeout=60)
        assert out.strip() == "done", err
    sizes = [path.stat().st_size for path in (tmp_path / "cache").rglob("*.tkc")]
    assert sum(sizes) <= 60_000
    assert list((tmp_path / "cache").rglob("tmp-*")) == []


KILLED = """
import os, sys
from pathlib import Path
from trainkernel.runtime.cache import CubinCache, Entry, cache_key
os.fsync = lambda descriptor: os._exit(9)  # dies with the data written and the name not yet given
CubinCache(Path(sys.argv[1])).put(cache_key({"source": "a"}), bytes(range(256)) * 8, {})
"""


def test_killed_writer_leaves_no_entry(tmp_path: Path) -> None:
    store = CubinCache(tmp_path / "cache")
    result = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "cache")], timeout=60)
    assert result.returncode == 9
    assert len(list((tmp_path / "cache").rglob("tmp-*"))) == 1
    assert store.get(KEY) is None
    assert store.put(KEY, CUBIN, {})
    assert store.get(KEY) == CUBIN


def test_build_compiles_once(store: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_cubin(source: str, arch: str) -> bytes:
        compiled.append((source, arch))
        return f"{source} for {arch}".encode()

    monkeypatch.setattr(build.nvrtc, "compile_cubin", compile_cubin)
    assert build.build_cubin("s", "sm_90", store) == build.build_cubin("s", "sm_90", store) == b"s for sm_90"
    assert build.build_cubin("s", "sm_80", store) == b"s for sm_80"
    assert build.build_cubin("t", "sm_80", store) == b"t for sm_80"
    assert len(compiled) == 3
