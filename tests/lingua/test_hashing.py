from __future__ import annotations

import numpy as np
import pytest
import torch

from lingua.hashing import counter_hash, permutation, text_hash

MASK = (1 << 64) - 1


def splitmix64_finalizer(x: int) -> int:
    """Steele, Lea and Flood's mixing function on Python's unbounded integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def test_one_key_is_splitmix64() -> None:
    # Published first output of splitmix64 seeded with 0.
    assert counter_hash(0) & MASK == 0xE220A8397B1DCDAF
    state = (12345 + 0x9E3779B97F4A7C15) & MASK
    assert counter_hash(12345) & MASK == splitmix64_finalizer(state)


def test_numpy_torch_and_python_agree() -> None:
    keys = np.array([0, 1, -1, 2**62, -(2**63), 2**63 - 1], dtype=np.int64)
    from_numpy = counter_hash(7, 2**63 + 5, keys)
    from_torch = counter_hash(7, 2**63 + 5, torch.from_numpy(keys))
    assert from_numpy.tolist() == from_torch.tolist()
    assert from_numpy.tolist() == [counter_hash(7, 2**63 + 5, int(key)) for key in keys]


def test_bits_are_balanced_and_neighbours_unrelated() -> None:
    values = counter_hash(3, np.arange(20_000, dtype=np.int64)).view(np.uint64)
    ones = [int(((values >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert max(abs(count - 10_000) for count in ones) < 4 * 71  # four standard deviations
    flips = np.bitwise_count(values[1:] ^ values[:-1]).mean()
    assert abs(flips - 32) < 0.2


def test_permutation_is_one_and_depends_on_every_key() -> None:
    assert sorted(permutation(1000, 1, 2)) == list(range(1000))
    assert permutation(1000, 1, 2).tolist() == permutation(1000, 1, 2).tolist()
    assert permutation(1000, 1, 2).tolist() != permutation(1000, 2, 1).tolist()


def test_text_hash_is_blake2b() -> None:
    assert text_hash("") & MASK == int.from_bytes(bytes.fromhex("e4a6a0577479b2b4"), "little")
    assert text_hash("a") != text_hash("b")


def test_other_integer_types_are_refused() -> None:
    with pytest.raises(TypeError, match="int32"):
        counter_hash(1, np.arange(3, dtype=np.int32))
