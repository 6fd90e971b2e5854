"""Data and checkpoints on a server of the S3 protocol on loopback, sharded over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lingua.metrics import read_metrics
from tests.ranks import run_ranks, train_ranks
from tests.support import deterministic, tiny_words


@pytest.fixture
def s3() -> Iterator[tuple[dict[str, str], object]]:
    """Environment of a server with a bucket ``bucket``, and a client of it."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.get_host_and_port()[1]}",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    client = boto3.client(
        "s3",
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        region_name="us-east-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
    )
    client.create_bucket(Bucket="bucket")
    yield variables, client
    server.stop()


@pytest.mark.slow
def test_a_run_whose_data_and_checkpoints_are_on_s3(s3, corpus: Path, tmp_path: Path) -> None:
    """Two ranks, killed, resumed on two: the bits of a run on a disk. Then on one, from the folder's name alone."""
    variables, client = s3
    for path in corpus.rglob("*.*"):
        client.upload_file(str(path), "bucket", f"data/{path.relative_to(corpus)}")

    def keys(prefix: str) -> set[str]:
        return {item["Key"] for item in client.list_objects_v2(Bucket="bucket", Prefix=prefix).get("Contents", [])}

    changes = {"steps": 12, "validation__every": 12, "checkpoint__dump__every": 4, "distributed__dp_shard": 2}
    changes |= {"micro_rows": 2, "checkpoint__dump__keep": 2}
    train_ranks(2, "crossbert", tiny_words("crossbert", corpus, tmp_path / "local", **changes), tmp_path / "out_local")
    words = tiny_words("crossbert", corpus, tmp_path / "run", **changes, checkpoint__path="s3://bucket/run")
    words = [word.replace(f"={corpus}", "=s3://bucket/data") for word in words] + [f"data.cache_dir={tmp_path}/cache"]
    killed = run_ranks(2, ["-m", "tests.faulty", "crossbert", "SIGKILL:1:7", *words], tmp_path / "out_1", **variables)
    assert [rank.status for rank in killed] == [1, -9]
    assert "run/0000000004/COMPLETE" in keys("run/")
    client.delete_object(Bucket="bucket", Key="run/0000000008/COMPLETE")
    train_ranks(2, "crossbert", words, tmp_path / "out_2", **variables)
    assert "resumed s3://bucket/run/0000000004 at step 4" in (tmp_path / "run/train.log").read_text()
    figures = [deterministic(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("local", "run")]
    assert figures[0] == figures[1]
    assert {key.split("/")[1] for key in keys("run/")} == {"0000000008", "0000000012"}  # keep=2
    assert not (tmp_path / "run/checkpoints").exists()

    more = [*words, "steps=13", "resume.allow=[steps]"]
    client.put_object(Bucket="bucket", Key="run/0000000012/__1_0.distcp", Body=b"cut off")  # damage is seen here too
    train_ranks(1, "crossbert", more, tmp_path / "out_3", **variables)
    text = (tmp_path / "out_3/rank_0.txt").read_text()
    assert "s3://bucket/run/0000000012 is not used: __1_0.distcp has 7 bytes" in text
    assert "resumed s3://bucket/run/0000000008 at step 8" in text

    ended = run_ranks(
        1, ["-m", "lingua.checkpoint", f"path={tmp_path}/run"], tmp_path / "out_4", **variables, WORLD_SIZE="1"
    )
    assert ended[0].status == 0, ended[0].text
    assert ended[0].text.count("whole") == 2
