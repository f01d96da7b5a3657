"""The on-disk cache of cubins, under the hash of a source or of a whole Program.

One file per entry holds everything, so that two writers can never mix halves of two entries::

    magic (8 bytes) | format version (u32) | metadata size (u32) | cubin size (u64)
    sha256 of all that follows (32 bytes) | metadata (JSON) | cubin

The file's name is the sha256 of what the cubin was made from, and the metadata repeats it. A
cubin is code: an entry is used only if its digest is right and if nobody but this user could
have written it. Everything else, and every I/O error, is a miss: the cache can cost time, never
a result.

``TRAINKERNEL_CACHE_DIR`` sets the folder (default ``$XDG_CACHE_HOME`` or ``~/.cache``, then
``trainkernel``), ``TRAINKERNEL_CACHE=0`` turns the cache off, ``TRAINKERNEL_CACHE_MAX_BYTES`` bounds its
size (default 256 MiB; the entries not used for longest go first).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkernel.errors import OptionError

FORMAT_VERSION = 1
DEFAULT_MAX_BYTES = 256 * 1024 * 1024
_MAGIC = b"TKCUBIN\0"
_HEAD = struct.Struct("<8sIIQ32s")
_SUFFIX = ".tkc"
_TEMPORARY_PREFIX = "tmp-"
_STALE_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """A cubin, and what was stored beside it: values as JSON has them."""

    metadata: Mapping[str, Any]
    cubin: bytes


def cache_key(parts: Mapping[str, str]) -> str:
    """The name of an entry: a sha256 over named parts, in hexadecimal."""
    text = json.dumps(sorted(parts.items()), ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def default_directory() -> Path | None:
    """The folder that the environment asks for; None where the cache is off or there is no home."""
    if os.environ.get("TRAINKERNEL_CACHE", "1").strip().lower() in ("0", "off", "false", "no"):
        return None
    return user_directory()


def user_directory() -> Path | None:
    """The folder of every cache, whether or not that of cubins is on; None where there is no such place."""
    chosen = os.environ.get("TRAINKERNEL_CACHE_DIR")
    if chosen:
        try:
            return Path(os.path.abspath(os.path.expanduser(chosen)))
        except OSError:  # a relative path, in a working directory that was removed
            return None
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):  # the XDG rule: a relative path is to be ignored
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "trainkernel" if os.path.isabs(base) else None


def max_bytes_from_environment() -> int:
    """The size bound.

    Raises
    ------
    OptionError
        If ``TRAINKERNEL_CACHE_MAX_BYTES`` is not a whole number of bytes.
    """
    text = os.environ.get("TRAINKERNEL_CACHE_MAX_BYTES")
    if not text:
        return DEFAULT_MAX_BYTES
    if not re.fullmatch("[0-9]{1,18}", text.strip()):
        raise OptionError(f"TRAINKERNEL_CACHE_MAX_BYTES must be a number of bytes, got {text[:40]!r}")
    return int(text)


def pack_entry(key: str, cubin: bytes, metadata: Mapping[str, Any]) -> bytes:
    """The bytes of an entry's file."""
    text = json.dumps({**metadata, "key": key}, sort_keys=True).encode()
    digest = hashlib.sha256(text + cubin).digest()
    return _HEAD.pack(_MAGIC, FORMAT_VERSION, len(text), len(cubin), digest) + text + cubin


def unpack_entry(key: str, data: bytes) -> Entry | None:
    """The entry in a file's bytes, or None if they are damaged or another key's."""
    if len(data) < _HEAD.size:
        return None
    magic, version, metadata_size, cubin_size, digest = _HEAD.unpack_from(data)
    if magic != _MAGIC or version != FORMAT_VERSION or len(data) != _HEAD.size + metadata_size + cubin_size:
        return None
    payload = data[_HEAD.size :]
    if cubin_size == 0 or hashlib.sha256(payload).digest() != digest:
        return None
    try:
        metadata = json.loads(payload[:metadata_size])
    except (ValueError, RecursionError):
        return None
    if not isinstance(metadata, dict) or metadata.get("key") != key:
        return None
    return Entry(metadata, payload[metadata_size:])


class CubinCache:
    """A folder of cubins.

    Parameters
    ----------
    directory : Path or None
        None: nothing is found and nothing is stored.
    max_bytes : int
        Bound of the folder's size, kept by removing the entries not used for longest.
    """

    def __init__(self, directory: Path | None, max_bytes: int = DEFAULT_MAX_BYTES) -> None:
        self.directory = directory
        self.max_bytes = max_bytes

    @staticmethod
    def from_environment() -> CubinCache:
        """The cache that the ``TRAINKERNEL_CACHE*`` variables describe."""
        directory = default_directory()
        return CubinCache(directory, max_bytes_from_environment() if directory is not None else DEFAULT_MAX_BYTES)

    def path_of(self, key: str) -> Path | None:
        """The file of an entry."""
        return None if self.directory is None else self.directory / key[:2] / (key[2:] + _SUFFIX)

    def get(self, key: str) -> bytes | None:
        """The cubin stored under ``key``, or None; a hit counts as a use."""
        entry = self.load(key)
        return None if entry is None else entry.cubin

    def load(self, key: str) -> Entry | None:
        """The entry stored under ``key``, or None; a hit counts as a use."""
        path = self.path_of(key)
        if path is None:
            return None
        try:
            if not (_is_private(path.parent.parent) and _is_private(path.parent)):
                return None
            data = read_private_file(path, self.max_bytes)
            entry = None if data is None else unpack_entry(key, data)
            if entry is not None:
                os.utime(path)
            return entry
        except OSError:
            return None

    def put(self, key: str, cubin: bytes, metadata: Mapping[str, Any]) -> bool:
        """Store a cubin. Returns whether it was stored; an I/O error is no error of the caller's."""
        path = self.path_of(key)
        data = pack_entry(key, cubin, metadata)
        if path is None or len(data) > self.max_bytes:
            return False
        try:
            if not (make_private(path.parent.parent) and make_private(path.parent)):
                return False
            write_atomically(path, data)
        except OSError:
            return False
        with suppress(OSError):  # another process removed the folder meanwhile; the next writer evicts
            self._evict()
        return True

    def _evict(self) -> None:
        """Remove the entries not used for longest until the bound holds, and stale temporary files."""
        assert self.directory is not None
        entries: list[tuple[float, int, str]] = []
        for folder in os.scandir(self.directory):
            if not folder.is_dir(follow_symlinks=False) or len(folder.name) != 2:
                continue
            with suppress(OSError):  # removed, or of someone else: the other folders are still bounded
                entries += entries_of(folder.path, _SUFFIX)
        evict(entries, self.max_bytes)


def entries_of(folder: str | Path, suffix: str) -> list[tuple[float, int, str]]:
    """Time of last use, size and path of a folder's entries; stale temporary files are removed.

    Raises
    ------
    OSError
        If the folder cannot be read.
    """
    entries = []
    for item in os.scandir(folder):
        try:
            info = item.stat(follow_symlinks=False)
        except OSError:  # another process removed it
            continue
        if item.name.startswith(_TEMPORARY_PREFIX):
            if time.time() - info.st_mtime > _STALE_SECONDS:
                _unlink(item.path)
        elif item.name.endswith(suffix):
            entries.append((info.st_mtime, info.st_size, item.path))
    return entries


def evict(entries: Iterable[tuple[float, int, str]], max_bytes: int) -> None:
    """Remove the files not used for longest until those left have at most ``max_bytes`` together.

    Parameters
    ----------
    entries : iterable of (float, int, str)
        Time of last use, size in bytes and path.
    max_bytes : int
    """
    entries = sorted(entries)
    total = sum(size for _, size, _ in entries)
    for _, size, path in entries:
        if total <= max_bytes:
            return
        if _unlink(path):
            total -= size


def _unlink(path: str) -> bool:
    """Remove a file; whether its space is free now."""
    try:
        os.unlink(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)  # another process was faster
    return True


def _others_can_write(info: os.stat_result) -> bool:
    """Whether someone other than this user owns a file or may write to it."""
    if not hasattr(os, "geteuid"):  # Windows: the profile folder's access list does this
        return False
    return info.st_uid != os.geteuid() or bool(info.st_mode & (stat.S_IWGRP | stat.S_IWOTH))


def make_private(folder: Path) -> bool:
    """Make a folder that only this user can write, or see whether an existing one is such.

    Raises
    ------
    OSError
        If it can neither be made nor seen.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return _is_private(folder)


def _is_private(folder: Path) -> bool:
    info = os.lstat(folder)
    return stat.S_ISDIR(info.st_mode) and not _others_can_write(info)


def read_private_file(path: Path, max_bytes: int) -> bytes | None:
    """The bytes of a regular file that only this user can write; None for any other, or a larger one.

    Raises
    ------
    OSError
        If it cannot be read.
    """
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or _others_can_write(info) or info.st_size > max_bytes:
            return None
        return file.read(info.st_size)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file of mode 0600: other processes see all of it or nothing.

    Raises
    ------
    OSError
        If it cannot be written; nothing is left of it then.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY_PREFIX, dir=path.parent)  # mode 0600
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
    except BaseException:
        _unlink(temporary)
        raise
