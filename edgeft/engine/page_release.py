"""Memory given back as soon as it is not used: pages of mapped weights after every product, freed buffers at once.

Numbers stay the same. Pages come again from the system's cache, if that has room for them, or else from the disk.
"""

from __future__ import annotations

from edgeft.host.system import set_malloc_option, trim_malloc

on = False

# mallopt's numbers in glibc's malloc.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
LARGE_BYTES = 1 << 20  # buffers from here on have pages of their own. Left to itself, glibc raises this to 32 MiB, and
# what is freed between others stays


def enable(wanted: bool) -> None:
    """For this process from now on; what malloc was told once, it keeps."""
    global on
    on = wanted
    if wanted:
        large_apart()
        set_malloc_option(M_ARENA_MAX, 1)


def large_apart() -> None:
    """Freed buffers go back at once, at the price of fresh pages for the next; for this process from now on."""
    set_malloc_option(M_MMAP_THRESHOLD, LARGE_BYTES)
    set_malloc_option(M_TRIM_THRESHOLD, LARGE_BYTES)


def trim(always: bool = False) -> None:
    """Gives back what lies free now; where memory is not short, it is mostly about to be used again."""
    if on or always:
        trim_malloc()
