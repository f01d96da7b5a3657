"""Source to cubin through the cache."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from trainkernel.runtime import nvrtc
from trainkernel.runtime.cache import CubinCache, cache_key


@cache
def _installed_version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"


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
        "nvrtc": ".".join(str(part) for part in nvrtc.nvrtc_version()),
        # NVRTC does not report its patch level; its distribution's version does where pip brought it.
        "nvrtc_distribution": _installed_version("nvidia-cuda-nvrtc"),
        "arch": arch,
        "options": f"--gpu-architecture={arch}",
    }
    key = cache_key({**parts, "source": source})
    cubin = cubins.get(key)
    if cubin is None:
        cubin = nvrtc.compile_cubin(source, arch)
        cubins.put(key, cubin, parts)
    return cubin
