"""Shared fixtures. One thread a process: two busy OpenMP pools on two cores stall each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path

import pytest
import torch

from tests.support import made_up_documents, prepare

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data.root_dir with one source, ``made_up``, in roberta tokens."""
    return prepare(tmp_path_factory.mktemp("corpus"), made_up_documents(300))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process of ``-n`` runs a whole file, whose fixtures are made once, and one of them all tests of SLURM.

    Files with slow tests come first: what is left in the end is short.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        where = item.path.relative_to(item.config.rootpath).as_posix()
        item.add_marker(pytest.mark.xdist_group("slurm" if where.startswith("tests/slurm/") else where))
