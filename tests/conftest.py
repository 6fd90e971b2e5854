"""Shared fixtures. One thread a process: two busy OpenMP pools on two cores stall each other."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from tests.support import made_up_documents, prepare

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data.root_dir with one source, ``made_up``, in roberta tokens."""
    return prepare(tmp_path_factory.mktemp("corpus"), made_up_documents(300))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: what is left in the end is short."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    """With ``-n``, one process runs a whole file, whose fixtures are made once, and one of them all tests of SLURM."""
    from xdist.scheduler import LoadScopeScheduling

    class FileScheduling(LoadScopeScheduling):
        # xdist_group marks would do, but pytest 9.2 no longer hands them to pytest-xdist 3.8.
        def _split_scope(self, nodeid: str) -> str:
            return "slurm" if nodeid.startswith("tests/slurm/") else nodeid.partition("::")[0]

    return FileScheduling(config, log)
