"""Keep the memory of freed tensors.

Every micro-batch allocates and frees the same few hundred buffers of several MB. By default glibc returns such buffers
to the system at once, and the next one is paid for with a page fault and a zeroed page per 4 kB: 5-15 % of a training
step, more in virtual machines.
"""

import ctypes
import functools
import logging
import platform

log = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST = 2**31 - 1


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc, for the whole process, not to return freed memory. False where the C library is another one.

    The process then stays at its peak size until it ends, which is what a training worker needs.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    kept = bool(libc.mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, _LARGEST))
    if not kept:
        log.info("glibc refused mallopt; freed memory goes back to the system")
    return kept
