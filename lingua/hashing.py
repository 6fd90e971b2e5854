"""One counter hash for everything that is random but must not depend on state.

Masks, shuffles and splits are functions of integers (seed, row, position, ...), so they are the same on
any device, in any process and after any resume, and do not change with the version of a library's
random generator. The same code runs on NumPy and on PyTorch int64 arrays, because both wrap around.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np


def _signed(value: int) -> int:
    """``value`` modulo 2^64 as a signed 64-bit integer."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


# Constants of the splitmix64 generator (Steele, Lea, Flood 2014).
_GAMMA = _signed(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = _signed(0x94D049BB133111EB)


def _mix(x: Any) -> Any:
    # int64 has only an arithmetic shift: the mask drops the sign bits it brings in.
    x = (x ^ ((x >> 30) & ((1 << 34) - 1))) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & ((1 << 37) - 1))) * _MULTIPLIER_2
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def _mix_int(x: int) -> int:
    x &= (1 << 64) - 1
    x = (x ^ (x >> 30)) * (_MULTIPLIER_1 & ((1 << 64) - 1)) & ((1 << 64) - 1)
    x = (x ^ (x >> 27)) * (_MULTIPLIER_2 & ((1 << 64) - 1)) & ((1 << 64) - 1)
    return _signed(x ^ (x >> 31))


def counter_hash(*keys: Any) -> Any:
    """A 64-bit hash of a tuple of integers, elementwise over arrays.

    Args:
        keys: Python integers, NumPy int64 arrays or torch int64 tensors that broadcast together (not both
            kinds of array at once). Scalars should come first: they are mixed once.

    Returns:
        int64 of the broadcast shape (a Python int if all keys are), uniform over all 64 bits.
    """
    state: Any = 0
    for key in keys:
        if isinstance(key, np.ndarray) and key.dtype != np.int64:
            raise TypeError(f"counter_hash takes int64 arrays, got {key.dtype}")
        if isinstance(state, int) and isinstance(key, (int, np.integer)):
            state = _mix_int((state ^ int(key)) + _GAMMA)
        else:
            state = _mix((state ^ key) + _GAMMA)
    return state


def permutation(n: int, *keys: int) -> np.ndarray:
    """A pseudo-random permutation of ``range(n)`` (int64), a function of the integer ``keys`` alone."""
    return np.argsort(counter_hash(*keys, np.arange(n, dtype=np.int64)), kind="stable")


def text_hash(text: str) -> int:
    """A 64-bit hash of a text's UTF-8 bytes, the same in every process (Python's ``hash`` is salted)."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
