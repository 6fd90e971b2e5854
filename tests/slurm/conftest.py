"""The cluster that the tests of this folder share; they are skipped, with the reason, where there can be none."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, UnavailableError, install
from tests.slurm.launching import Launcher

REQUIRED = "REQUIRE_SLURM"  # set by setup/test.sh all: there, a skip would hide that nothing was tested


@pytest.fixture(scope="session")
def running_cluster() -> Iterator[Cluster]:
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    try:
        install()
        cluster = Cluster(folder)
    except (UnavailableError, TimeoutError, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        if os.environ.get(REQUIRED, "0") != "0":
            raise
        pytest.skip(f"no SLURM here: {error}")
    yield cluster
    cluster.stop()
    shutil.rmtree(folder)


@pytest.fixture
def launcher(running_cluster: Cluster, corpus: Path, tmp_path: Path) -> Iterator[Launcher]:
    """Launches runs under ``tmp_path``; the cluster is empty before and after."""
    yield Launcher(running_cluster, corpus, tmp_path)
    running_cluster.cancel_all()
