import json
import sys

import fsspec
import pytest

from benchmarks.object_store import ObjectStoreArgs, main, object_store_rate, object_store_table
from lingua.errors import UserError


def test_requests_and_bytes_are_those_of_the_blocks(tmp_path, capsys):
    """With an empty cache every block is fetched once, in one request, and nothing else; with a full one nothing is."""
    before = dict(fsspec.config.conf)
    main(ObjectStoreArgs(out=f"{tmp_path}/r.json", megabytes=24, batch_rows=500))
    assert dict(fsspec.config.conf) == before
    result = json.loads((tmp_path / "r.json").read_text())
    first, again, later, small = result["readings"]
    assert (first["reading"], again["reading"]) == ("first epoch, empty cache", "first epoch, full cache")
    millions = result["shard_bytes"] / 2 / 1e6
    # of the source of 18 MB four shards of 4.5 MB, that is 2 blocks each, of the other four of 1 block
    assert first["requests_per_million"] * millions == pytest.approx(12, rel=0.02)
    assert first["bytes_per_million"] == pytest.approx(2e6, rel=0.02)
    assert first["needed"] == pytest.approx(1, rel=0.02)
    assert (again["requests_per_million"], again["bytes_per_million"]) == (0, 0)
    assert later["requests_per_million"] * millions == pytest.approx(12, rel=0.02)
    assert small["bytes_per_million"] >= later["bytes_per_million"]
    assert all(reading["tokens_per_second"] > 0 for reading in result["readings"])
    assert object_store_table(result) in capsys.readouterr().out


def test_mistakes(monkeypatch):
    with pytest.raises(UserError, match="megabytes=0: expected at least 1"):
        ObjectStoreArgs(out="x", megabytes=0)
    monkeypatch.setitem(sys.modules, "moto.server", None)
    with pytest.raises(UserError, match=r"the object-store benchmark needs the package moto .*requirements-dev\.txt"):
        object_store_rate(1, 512, 100)
