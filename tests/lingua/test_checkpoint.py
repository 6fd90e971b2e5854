from __future__ import annotations

import errno
import json
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from lingua import checkpoint
from lingua.errors import UserError
from lingua.saving import save

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
    write(tmp_path, 2, net, optimizer)  # and is written over
    assert checkpoint.resolve(tmp_path) == second


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


@pytest.mark.parametrize("at", range(6))
def test_a_full_disk_is_said_and_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch, at: int) -> None:
    net, optimizer = net_and_optimizer()
    first = write(tmp_path, 1, net, optimizer)
    writes = 0
    real_open, real_write_text = Path.open, Path.write_text

    def full() -> None:
        nonlocal writes
        writes += 1
        if writes > at:
            raise OSError(errno.ENOSPC, "No space left on device")

    def open_file(self: Path, mode: str = "r", *args, **kwargs):
        if "w" in mode:
            full()
        return real_open(self, mode, *args, **kwargs)

    def write_text(self: Path, *args, **kwargs):
        full()
        return real_write_text(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_file)
    monkeypatch.setattr(Path, "write_text", write_text)
    message = None
    try:
        second = write(tmp_path, 2, net, optimizer)
    except UserError as error:
        message = str(error)
    if message is not None:
        assert "No space left on device" in message
        assert "earlier checkpoints are intact" in message
        assert not (tmp_path / "checkpoints/0000000002").exists()
        assert checkpoint.resolve(tmp_path) == first
    else:
        assert writes <= at  # the fault lay behind the last write
        assert checkpoint.resolve(tmp_path) == second
    monkeypatch.undo()
    assert checkpoint.load(checkpoint.resolve(tmp_path), net, optimizer)["step"] in (1, 2)


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


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    net, optimizer = net_and_optimizer()
    for step in (1, 2, 3):
        write(tmp_path, step, net, optimizer)
    (write(tmp_path, 4, net, optimizer) / checkpoint.COMPLETE).unlink()  # does not count
    checkpoint.remove_old(tmp_path / "checkpoints", 2)
    assert [folder.name[-1] for folder in checkpoint.complete_checkpoints(tmp_path / "checkpoints")] == ["2", "3"]
    checkpoint.remove_old(tmp_path / "checkpoints", -1)
    assert len(checkpoint.complete_checkpoints(tmp_path / "checkpoints")) == 2


def test_the_listing_has_sizes_and_checksums(tmp_path: Path) -> None:
    folder = write(tmp_path, 1, *net_and_optimizer())
    listing = json.loads((folder / checkpoint.COMPLETE).read_text())
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert set(listing) == files - {checkpoint.COMPLETE}


@pytest.mark.parametrize(
    ("path", "message"), [("nowhere", "no such run or checkpoint folder"), (".", "holds no complete checkpoint")]
)
def test_a_wrong_path_is_named(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        checkpoint.resolve(tmp_path / path)
