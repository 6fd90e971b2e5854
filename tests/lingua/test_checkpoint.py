from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from lingua import checkpoint, storage
from lingua.distributed import World
from lingua.errors import UserError
from lingua.saving import CheckpointArgs, Checkpointer, DumpArgs, save

CONFIG = "model: {dim: 32}\n"


def net_and_optimizer(width: int = 8) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(width, width), nn.RMSNorm(width))
    groups = [
        {"params": [net[0].weight], "weight_decay": 0.1},
        {"params": [net[0].bias, net[1].weight], "weight_decay": 0.0},
    ]
    return net, torch.optim.AdamW(groups, lr=0.1, fused=True)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        net(torch.arange(8.0)[None] + step).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def write(run: Path, step: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> Path:
    folder = run / "checkpoints" / f"{step:010d}"
    save(folder, net, optimizer, {"step": step}, CONFIG)
    return folder


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path: Path) -> None:
    net, optimizer = net_and_optimizer()
    train(net, optimizer, 3)
    folder = write(tmp_path, 3, net, optimizer)
    saved = {name: value.clone() for name, value in net.state_dict().items()}
    train(net, optimizer, 2)
    expected = {name: value.clone() for name, value in net.state_dict().items()}

    other, other_optimizer = net_and_optimizer()
    assert checkpoint.load(folder, other, other_optimizer) == {"version": 1, "step": 3}
    assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
    assert other_optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 3)
    assert [group["weight_decay"] for group in other_optimizer.param_groups] == [0.1, 0.0]
    train(other, other_optimizer, 2)
    assert all(torch.equal(value, expected[name]) for name, value in other.state_dict().items())


def test_a_folder_without_complete_does_not_exist(tmp_path: Path) -> None:
    net, optimizer = net_and_optimizer()
    first, second = (write(tmp_path, step, net, optimizer) for step in (1, 2))
    assert checkpoint.complete_checkpoints(tmp_path / "checkpoints") == [first, second]
    (second / checkpoint.COMPLETE).unlink()
    assert checkpoint.complete_checkpoints(tmp_path / "checkpoints") == [first]
    assert checkpoint.resolve(tmp_path) == first
    with pytest.raises(UserError, match="damaged: no COMPLETE file"):
        checkpoint.resolve(second)
    (second / "__9_0.distcp").write_text("of a run on more ranks")
    write(tmp_path, 2, net, optimizer)  # and is written over
    assert checkpoint.resolve(tmp_path) == second
    assert not (second / "__9_0.distcp").exists()


@pytest.mark.parametrize("damage", ["truncated", "missing", "flipped"])
def test_damage_is_named_and_the_one_before_is_used(tmp_path: Path, damage: str, caplog) -> None:
    net, optimizer = net_and_optimizer()
    first, second = (write(tmp_path, step, net, optimizer) for step in (1, 2))
    data = next(second.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    if damage == "flipped":
        content[len(content) // 2] ^= 255
        data.write_bytes(content)
        assert checkpoint.find_damage(second) is None  # sizes alone do not show it
        assert "has changed since it was written" in checkpoint.find_damage(second, checksums=True)
        return
    data.write_bytes(content[:-1]) if damage == "truncated" else data.unlink()
    assert checkpoint.complete_checkpoints(tmp_path / "checkpoints") == [first]
    assert data.name in caplog.text
    assert (
        f"{len(content) - 1} bytes, {len(content)} were written" if damage == "truncated" else "missing"
    ) in caplog.text


def test_another_shape_is_refused_before_anything_changes(tmp_path: Path) -> None:
    net, optimizer = net_and_optimizer()
    train(net, optimizer, 1)
    folder = write(tmp_path, 1, net, optimizer)
    wider, wider_optimizer = net_and_optimizer(9)
    with pytest.raises(UserError, match=r"model\.0\.weight has shape \(8, 8\), the model's is \(9, 9\)"):
        checkpoint.load(folder, wider, wider_optimizer)
    deeper = nn.Sequential(*net_and_optimizer()[0], nn.Linear(8, 8))
    with pytest.raises(UserError, match=r"has no model\.2\.weight: it was made by another model config"):
        checkpoint.load(folder, deeper, torch.optim.AdamW(deeper.parameters()))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fault_at_any_file_operation_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch, asynchronous
) -> None:
    """One fault after the other, at each operation of the file layer that a save makes, until one comes too late."""
    net, optimizer = net_and_optimizer()
    first = write(tmp_path, 1, net, optimizer)
    root = tmp_path / "checkpoints"
    left = 0

    def operation() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            raise OSError(errno.EIO, "Input/output error")

    def failing(real):
        def function(*args, **kwargs):
            operation()
            return real(*args, **kwargs)

        return function

    for name in ("mkdir", "rename", "unlink", "rmdir", "stat", "exists"):
        monkeypatch.setattr(Path, name, failing(getattr(Path, name)))
    real_open = Path.open

    class File:
        def __init__(self, file) -> None:
            self.file = file

        def __getattr__(self, name: str):
            return failing(self.file.write) if name == "write" else getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *exc) -> None:
            self.file.close()

    def open_file(self: Path, mode: str = "r", *args, **kwargs):
        operation()
        file = real_open(self, mode, *args, **kwargs)
        return File(file) if "w" in mode else file

    monkeypatch.setattr(Path, "open", open_file)
    monkeypatch.setattr(os, "fsync", failing(os.fsync))
    at = faults = 0
    while True:
        left, said = at, None
        writer = Checkpointer(root, CheckpointArgs(asynchronous=asynchronous))
        try:
            writer.save(2, net, optimizer, {"step": 2}, CONFIG)
            writer.wait()
        except UserError as error:
            said = str(error)
        passed, left = left, 10**9
        found = checkpoint.newest(root)
        whole = found == root / "0000000002"
        assert found == first or whole
        assert checkpoint.load(found, *net_and_optimizer())["step"] == int(found.name)
        if said is None and passed >= 0:
            break
        if said is not None:  # a fault while old checkpoints are removed is a line in the log
            assert "Input/output error" in said
            assert "earlier checkpoints are intact" in said
            assert not whole
        faults += 1
        at += 1 if at < 10 or said is None else 1 + faults % 7  # the many small writes of a tensor are alike
        if whole:
            checkpoint.remove_folder(found)
    assert faults > 20
    assert whole


def test_a_really_full_disk(tmp_path: Path) -> None:
    """PyTorch's writer reports it in its own words, which only a real full disk shows."""
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        first = write(tmp_path / "disk", 1, *net_and_optimizer())
        with pytest.raises(UserError, match=r"0000000002: .*No space left on device.* earlier checkpoints are intact"):
            write(tmp_path / "disk", 2, *net_and_optimizer(200))
        assert checkpoint.resolve(tmp_path / "disk") == first
        assert not (tmp_path / "disk/checkpoints/0000000002").exists()
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path / "disk")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        first = write(tmp_path / "disk", 1, *net_and_optimizer())
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
        with pytest.raises(UserError, match=r"0000000002: Read-only file system"):
            write(tmp_path / "disk", 2, *net_and_optimizer())
        assert checkpoint.newest(tmp_path / "disk/checkpoints") == first
        with checkpoint.in_use(first):  # nobody removes anything there, so there is nothing to hold
            assert checkpoint.load(first, *net_and_optimizer())["step"] == 1
    finally:
        subprocess.run(["umount", str(tmp_path / "disk")], check=True)


def test_at_most_one_is_written_at_a_time_and_its_failure_is_told(tmp_path: Path, monkeypatch) -> None:
    net, optimizer = net_and_optimizer()
    go, under_way, most = threading.Event(), 0, 0
    real = storage.Writer.finish

    def finish(self, **given):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        go.wait(5)
        under_way -= 1
        if self.path.name.endswith("3"):
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return real(self, **given)

    monkeypatch.setattr(storage.Writer, "finish", finish)
    told = []
    writer = Checkpointer(tmp_path, CheckpointArgs(), completed=told.append)
    weights = {name: value.clone() for name, value in net.state_dict().items()}
    writer.save(1, net, optimizer, {"step": 1}, CONFIG)
    writer.check()  # not over, no failure
    train(net, optimizer, 1)  # does not touch what is being written
    assert checkpoint.newest(tmp_path) is None
    go.set()
    writer.save(2, net, optimizer, {"step": 2}, CONFIG)
    writer.save(3, net, optimizer, {"step": 3}, CONFIG)
    with pytest.raises(UserError, match="0000000003: Disk quota exceeded"):
        writer.wait()
    writer.close()
    assert most == 1
    assert [folder.name[-1] for folder in told] == ["1", "2"]
    assert [folder.name[-1] for folder in checkpoint.complete_checkpoints(tmp_path)] == ["1", "2"]
    other, other_optimizer = net_and_optimizer()
    checkpoint.load(tmp_path / "0000000001", other, other_optimizer)
    assert all(torch.equal(value, weights[name]) for name, value in other.state_dict().items())
    assert writer.seconds > 0


def test_what_somebody_reads_is_not_removed(tmp_path: Path, monkeypatch) -> None:
    net, optimizer = net_and_optimizer()
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3, 4, 5):
        write(tmp_path, step, net, optimizer)
    with checkpoint.in_use(root / "0000000001"):
        time.sleep(0.2)  # the lease is written by a thread
        checkpoint.remove_old(root, keep=1, keep_every=2)
        assert [folder.name[-1] for folder in checkpoint.complete_checkpoints(root)] == ["1", "2", "4", "5"]
    checkpoint.remove_old(root, keep=1, keep_every=4)
    assert [folder.name[-1] for folder in checkpoint.complete_checkpoints(root)] == ["4", "5"]
    (root / "0000000004/IN_USE.dead").write_text(json.dumps({"until": time.time() - 1, "host": "gone"}))
    checkpoint.remove_old(root, keep=1)
    assert [folder.name[-1] for folder in checkpoint.complete_checkpoints(root)] == ["5"]


def test_a_reader_goes_on_saying_that_it_reads(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "LEASE_SECONDS", 6)

    def until() -> float:
        return max((json.loads(text)["until"] for p in tmp_path.glob("IN_USE.*") if (text := p.read_text())), default=0)

    with checkpoint.in_use(tmp_path):
        while not (first := until()):
            time.sleep(0.01)
        while until() <= first:
            time.sleep(0.1)
            assert time.time() < first  # what it said last still holds
    assert not list(tmp_path.iterdir())


def test_the_command_reads_every_byte(tmp_path: Path, capsys) -> None:
    net, optimizer = net_and_optimizer()
    write(tmp_path, 1, net, optimizer)
    second = write(tmp_path, 2, net, optimizer)
    checkpoint.check(checkpoint.CheckArgs(str(tmp_path)))
    assert capsys.readouterr().out.count("whole") == 2
    data = next(second.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match="1 of 2 checkpoints cannot be used"):
        checkpoint.check(checkpoint.CheckArgs(str(tmp_path)))
    assert "checksum differs" in capsys.readouterr().out
    assert checkpoint.newest(tmp_path / "checkpoints").name == "0000000001"


def test_only_the_newest_are_kept(tmp_path: Path, caplog) -> None:
    net, optimizer = net_and_optimizer()
    root = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        write(tmp_path, step, net, optimizer)
    (write(tmp_path, 4, net, optimizer) / checkpoint.COMPLETE).unlink()  # does not count
    checkpoint.remove_old(root, 2)
    assert "is not used" not in caplog.text  # once, at the start, is enough
    assert [folder.name[-1] for folder in checkpoint.complete_checkpoints(root)] == ["2", "3"]
    checkpoint.remove_old(root, -1)
    assert len(checkpoint.complete_checkpoints(root)) == 2


def test_a_later_one_of_flipped_bytes_does_not_push_out_what_is_whole(tmp_path: Path) -> None:
    """Its size is right, so only the start of a run, which reads every byte, knows."""
    net, optimizer = net_and_optimizer()
    whole, damaged = write(tmp_path, 5, net, optimizer), write(tmp_path, 10, net, optimizer)
    data = next(damaged.glob("*.distcp"))
    data.write_bytes(bytes(data.stat().st_size))
    assert checkpoint.newest(tmp_path / "checkpoints") == whole
    writer = Checkpointer(tmp_path / "checkpoints", CheckpointArgs(DumpArgs(keep=1)))
    writer.save(7, net, optimizer, {"step": 7}, CONFIG)
    writer.wait()
    assert not whole.exists()
    assert checkpoint.newest(tmp_path / "checkpoints") == tmp_path / "checkpoints/0000000007"
    writer.save(12, net, optimizer, {"step": 12}, CONFIG)  # the damaged one goes like any other
    writer.wait()
    writer.close()
    assert [folder.name for folder in checkpoint.list_checkpoints(tmp_path / "checkpoints")] == ["0000000012"]


def test_what_lies_beside_checkpoints_is_left_alone(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, *net_and_optimizer())
    root = folder.parent
    (root / "²").mkdir()  # a digit of no number
    (root / "0000000003").write_text("a file")
    (root / "0000000004").symlink_to("/nowhere")
    (root / "0000000005").mkdir()
    assert checkpoint.complete_checkpoints(root) == [folder]
    checkpoint.remove_old(root, 1)
    assert len(list(root.iterdir())) == 5


def test_a_file_that_is_gone_though_no_list_names_it(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, *net_and_optimizer())
    listing = json.loads((folder / checkpoint.COMPLETE).read_text())
    del listing["__0_0.distcp"]
    (folder / checkpoint.COMPLETE).write_text(json.dumps(listing))
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(UserError, match=r"0000000001 cannot be read: FileNotFoundError: .*__0_0\.distcp"):
        checkpoint.load(folder, *net_and_optimizer())


def test_storage_that_cannot_be_reached_is_named(tmp_path: Path, monkeypatch) -> None:
    with pytest.raises(UserError, match=r"zz://bucket/run: .*zz"):
        storage.as_path("zz://bucket/run")
    alone = World(torch.device("cpu"))
    with pytest.raises(UserError, match="/proc/nothing: cannot be reached: No such file or directory"):
        storage.check_shared(Path("/proc/nothing"), alone)
    storage.check_shared(tmp_path / "a/b", alone)
    assert list((tmp_path / "a/b").iterdir()) == []

    class ServerError(Exception):  # of no kind that Python knows
        pass

    def fail(*args: object, **given: object) -> None:
        raise ServerError("the server is down")

    remote = storage.as_path(f"memory://{tmp_path.name}/run")
    net, optimizer = net_and_optimizer()
    writer = Checkpointer(remote, CheckpointArgs(asynchronous=False))
    monkeypatch.setattr(storage.Writer, "finish", fail)
    with pytest.raises(UserError, match=r"cannot write checkpoint memory.*0000000001: the server is down"):
        writer.save(1, net, optimizer, {"step": 1}, CONFIG)
    monkeypatch.setattr(type(remote), "is_dir", fail)
    for command in (checkpoint.resolve, lambda path: checkpoint.check(checkpoint.CheckArgs(path))):
        with pytest.raises(UserError, match=r"memory.*run: cannot be reached: the server is down"):
            command(str(remote))
    writer = Checkpointer(tmp_path, CheckpointArgs(asynchronous=False))
    with pytest.raises(CheckpointException, match="the server is down"):  # on a disk it is a fault of the program
        writer.save(1, net, optimizer, {"step": 1}, CONFIG)


def test_the_listing_has_sizes_and_checksums(tmp_path: Path, monkeypatch) -> None:
    synced, real = [], os.fsync

    def fsync(number: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{number}"))
        real(number)

    monkeypatch.setattr(os, "fsync", fsync)
    folder = write(tmp_path, 1, *net_and_optimizer())
    listing = json.loads((folder / checkpoint.COMPLETE).read_text())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listing) == files - {checkpoint.COMPLETE}
    # All of it is on the disk before it counts (.metadata and COMPLETE are renamed once they are).
    names = [Path(path).name.removesuffix(".partial").removesuffix(".tmp") for path in synced]
    assert set(names) == files
    assert names[-1] == checkpoint.COMPLETE


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "no such run or checkpoint folder"), (".", "holds no complete checkpoint")]
)
def test_a_wrong_path_is_named(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint.resolve(tmp_path / path)


def test_a_model_of_transformers_is_told_from_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"looks like a model of transformers: python -m lingua\.hub import source="):
        checkpoint.resolve(tmp_path)
