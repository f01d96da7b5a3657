"""Source to cubin through the cache, and which NVRTC that takes."""

from __future__ import annotations

import os
import sys
from functools import cache

from trainkernel.runtime import nvrtc
from trainkernel.runtime.cache import CubinCache, cache_key

_NVRTC = "nvidia-cuda-nvrtc"


@cache
def _installed_version(distribution: str) -> str:
    """The version of a distribution, which pip writes into the name of a folder; "unknown" if there is none.

    The folders are looked through in the order of imports. ``importlib.metadata`` does the same
    and more, and takes several milliseconds to be imported.
    """
    start, end = distribution.replace("-", "_") + "-", ".dist-info"
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # a zip file, or no folder at all
            continue
        for name in names:
            if name.startswith(start) and name.endswith(end):
                return name[len(start) : -len(end)]
    return "unknown"


def nvrtc_identity() -> str:
    """Which NVRTC compiles, without loading it where pip brought it: loading takes 0.1 s.

    Raises
    ------
    CompileError
        If NVRTC is not installed.
    """
    installed = _installed_version(_NVRTC)
    return installed if installed != "unknown" else f"NVRTC {_loaded_version()}"


def is_nvrtc(identity: str) -> bool:
    """Whether the NVRTC that is loaded now is that of ``nvrtc_identity``."""
    return identity == f"NVRTC {_loaded_version()}" or identity.startswith(f"{_loaded_version()}.")


def _loaded_version() -> str:
    return ".".join(str(part) for part in nvrtc.nvrtc_version())


def options_of(arch: str) -> str:
    """The options that NVRTC is given."""
    return f"--gpu-architecture={arch}"


def build_cubin(source: str, arch: str, cubins: CubinCache | None = None) -> bytes:
    """The cubin of a source for an architecture, from the cache or compiled and then stored.

    Parameters
    ----------
    source : str
    arch : str
    cubins : CubinCache, optional
        By default the one that the environment describes.

    Raises
    ------
    CompileError
        As ``nvrtc.compile_cubin``.
    """
    nvrtc.check_arch(arch)
    cubins = CubinCache.from_environment() if cubins is None else cubins
    parts = {
        "trainkernel": _installed_version("trainkernel"),
        "nvrtc": _loaded_version(),
        # NVRTC does not report its patch level; its distribution's version does where pip brought it.
        "nvrtc_distribution": _installed_version(_NVRTC),
        "arch": arch,
        "options": options_of(arch),
    }
    key = cache_key({**parts, "source": source})
    cubin = cubins.get(key)
    if cubin is None:
        cubin = nvrtc.compile_cubin(source, arch)
        cubins.put(key, cubin, parts)
    return cubin
