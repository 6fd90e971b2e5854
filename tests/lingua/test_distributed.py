from __future__ import annotations

import json
import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.distributed import (
    DistributedArgs,
    World,
    check_compiler,
    find_ranks,
    first_host,
    is_product,
    parallelize,
    pick_dtype,
    precision,
    start,
)  # fmt: skip
from lingua.errors import UserError
from lingua.masking import split_positions
from lingua.predictor import PredictorArgs
from tests.ranks import free_port, run_ranks
from tests.support import run_command

BOUNDS = {"fp64": 1e-9, "bf16": 2e-2}  # bf16: gathered norm weights are rounded, and sums come in another order


def run_grid(n: int, modes: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    out = folder / "grid.json"
    for ended in run_ranks(n, ["-m", "tests.grid", str(out), json.dumps(modes)], folder / "out", 400):
        assert ended.status == 0, ended.text
    return json.loads(out.read_text())


def check_grid(n: int, modes: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    found = run_grid(n, modes, folder)
    for mode, result in zip(modes, found["results"], strict=True):
        in_bf16 = mode.get("matrices") == "muon" and mode["dp_shard"] > 1  # products of parts of a matrix, in bf16
        bound = BOUNDS["bf16" if in_bf16 else mode.get("dtype", "fp64")]
        assert result["losses"] < bound, (mode, result)
        assert result["norms"] < bound * 10, (mode, result)
        assert result["weights"] < bound * 10, (mode, result)
        assert result["tied"], mode
    return found


def test_parallel_modes_agree_with_the_plain_model_on_two_ranks(tmp_path: Path) -> None:
    modes = [
        {"app": "crossbert", "dp_shard": 1},
        {"app": "crossbert", "dp_shard": 2},
        {"app": "crossbert", "dp_shard": -1, "reshard_after_forward": False, "activation_checkpointing": "block"},
        {"app": "bert", "dp_shard": 2, "activation_checkpointing": "selective"},
        {"app": "bert", "dp_shard": 2, "dtype": "bf16"},
        {"app": "clm", "dp_shard": 2, "activation_checkpointing": "block"},
        {"app": "electra", "dp_shard": 2},
        {"app": "crossbert", "dp_shard": 1, "matrices": "muon"},
        {"app": "crossbert", "dp_shard": 2, "matrices": "muon"},
        {"app": "crossbert_switches", "dp_shard": 2, "activation_checkpointing": "block"},
        {"app": "electra_disentangled", "dp_shard": 2, "activation_checkpointing": "selective"},
        {"app": "public", "dp_shard": 2, "activation_checkpointing": "block"},
        {"app": "public", "dp_shard": 2, "matrices": "muon"},
    ]
    found = check_grid(2, modes, tmp_path)
    traffic = [result["traffic"] for result in found["results"]]
    # Embedding and norms together, and each block (two, and the predictor's), once in each of three steps.
    assert [sum(n for name, n in t.items() if "reduce" in name) for t in traffic[:5]] == [0, 12, 12, 9, 9]
    assert 0 < traffic[2]["all_gather_single float64"] < traffic[1]["all_gather_single float64"]  # kept, or dropped
    assert traffic[4].keys() == {
        "all_gather_single bfloat16",
        "all_gather_single float32",
        "reduce_scatter_single float32",
    }
    assert "the ranks disagree on the code: sha256 is 'a' on rank 0" in found["said"]
    assert "'b' on rank 1" in found["said"]
    assert "disk_of_0: rank 1 does not see what rank 0 writes there" in found["unshared"]
    assert list((tmp_path / "disk_of_0").iterdir()) == []


@pytest.mark.slow
def test_parallel_modes_agree_with_the_plain_model_on_four_ranks(tmp_path: Path) -> None:
    modes = [
        {"app": app, "dp_shard": dp_shard, "activation_checkpointing": checkpointing}
        for app in ("bert", "crossbert")
        for dp_shard in (1, 2, 4)
        for checkpointing in ("none", "selective", "block")
    ]
    check_grid(4, modes, tmp_path)


@pytest.mark.slow
def test_compiled_parallel_modes_agree_with_the_plain_model(tmp_path: Path) -> None:
    modes = [
        {"app": "crossbert", "dp_shard": dp_shard, "activation_checkpointing": checkpointing, "compile": True}
        for dp_shard in (1, 2)
        for checkpointing in ("none", "selective", "block")
    ]
    modes += [
        {"app": app, "dp_shard": 2, "compile": True} for app in ("clm", "electra_disentangled", "crossbert_switches")
    ]
    check_grid(2, [*modes, {"app": "bert", "dp_shard": 2, "compile": True, "dtype": "bf16"}], tmp_path)


def tiny() -> CrossBert:
    return CrossBert(CrossBertArgs(dim=32, n_layers=2, n_heads=2, vocab_size=50, predictor=PredictorArgs(n_layers=1)))


@pytest.mark.parametrize("mode", ["selective", "block"])
def test_activation_checkpointing_keeps_what_it_says(mode: str) -> None:
    """Saved bytes shrink, gradients stay; selective saves the products and runs none of them twice."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.products += func is torch.ops.aten.mm.default
            return func(*args, **(kwargs or {}))

    def run(mode: str) -> tuple[int, int, list[torch.Tensor]]:
        with torch.device("meta"):
            model = tiny()
        parallelize(
            model, World(torch.device("cpu")), DistributedArgs(activation_checkpointing=mode), torch.float32, False
        )
        tokens = torch.arange(64).view(4, 16) % 50
        saved: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with Count() as count:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(tokens, split_positions(torch.arange(4), 16, 0.5, 0))
            loss.loss.backward()
        return sum(saved.values()), count.products, [parameter.grad for parameter in model.parameters()]

    plain_bytes, plain_products, plain_gradients = run("none")
    saved_bytes, products, gradients = run(mode)
    assert saved_bytes < plain_bytes
    assert (products == plain_products) == (mode == "selective")
    assert all(torch.equal(a, b) for a, b in zip(gradients, plain_gradients, strict=True))


def test_attention_of_every_backend_is_a_product() -> None:
    import torch.nn.attention.varlen  # registers its operators

    assert is_product(torch.ops.torch_attn._varlen_attn.default)
    assert is_product(torch.ops.higher_order.flex_attention)
    assert is_product(torch.ops.aten._scaled_dot_product_flash_attention.default)
    assert not is_product(torch.ops.aten.mul.Tensor)
    assert not is_product(torch.ops.aten._softmax.default)


def test_compiling_without_a_compiler_is_refused() -> None:
    from torch._inductor import config

    cpu = torch.device("cpu")
    check_compiler(cpu)
    with torch.device("meta"):
        model = tiny()
    missing = config.patch({"cpp.cxx": (None, "no-such-compiler")})
    with missing, pytest.raises(UserError, match=r"compile=true needs a C\+\+ compiler .* apt install g\+\+"):
        parallelize(model, World(cpu), DistributedArgs(), torch.float32, True)
    check_compiler(torch.device("cuda"))  # Triton has its own


def test_a_meta_model_gets_the_weights_of_a_plain_one() -> None:
    with torch.device("meta"):
        model = tiny()
    assert model.encoder.norm.weight.is_meta
    parallelize(model, World(torch.device("cpu")), DistributedArgs(), torch.float32, False)
    assert all(
        torch.equal(a, b) for a, b in zip(model.state_dict().values(), tiny().state_dict().values(), strict=True)
    )


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("login1", "login1"),
        ("gpu[07-09,12],login1", "gpu07"),
        ("a1,b[1-2]", "a1"),
        ("rack[2,4]n[3-5]", "rack2n3"),
        ("node-[001]", "node-001"),
    ],
)
def test_the_first_host_of_a_node_list(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_NTASKS")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (*VARIABLES, *SLURM, "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_ranks_are_found_in_the_environment(clean: pytest.MonkeyPatch) -> None:
    assert find_ranks() == (0, 1, 0, {})
    clean.setenv("SLURM_NTASKS", "8")  # a batch script, or salloc: one process
    clean.setenv("SLURM_PROCID", "0")
    assert find_ranks() == (0, 1, 0, {})
    for name, value in (("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "5"), ("SLURM_LOCALID", "1")):
        clean.setenv(name, value)
    clean.setenv("SLURM_STEP_NODELIST", "gpu[07-08]")
    clean.setenv("SLURM_JOB_ID", "123456")
    rank, size, local, meeting = find_ranks()
    assert (rank, size, local) == (5, 8, 1)
    assert meeting["MASTER_ADDR"] == "gpu07"
    assert 20000 <= int(meeting["MASTER_PORT"]) < 40000
    clean.setenv("MASTER_PORT", "555")
    assert find_ranks()[3]["MASTER_PORT"] == "555"
    for name, value in zip(VARIABLES, ("3", "4", "1", "host", "1234"), strict=True):
        clean.setenv(name, value)
    assert find_ranks() == (3, 4, 1, {})  # torchrun, whatever started it


def test_half_an_environment_is_named(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("RANK", "0")
    with pytest.raises(UserError, match="has RANK but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT"):
        find_ranks()
    for name, value in zip(VARIABLES, ("2", "2", "0", "127.0.0.1", str(free_port())), strict=True):
        clean.setenv(name, value)
    with pytest.raises(UserError, match="RANK=2 and WORLD_SIZE=2: expected 0 to 1"):
        find_ranks()
    for value in ("", "x", "-1"):
        clean.setenv("RANK", value)
        with pytest.raises(UserError, match=f"RANK={value!r}: expected a whole number"):
            find_ranks()


def test_ranks_that_do_not_come_are_waited_for_no_longer_than_said(clean: pytest.MonkeyPatch) -> None:
    for name, value in zip(VARIABLES, ("0", "2", "0", "127.0.0.1", str(free_port())), strict=True):
        clean.setenv(name, value)
    with pytest.raises(UserError, match=r"rank 0 of 2 could not meet the others at 127\.0\.0\.1:\d+: Timed out"):
        start(1000, patience=1)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dp_shard": 0}, "dp_shard=0: expected -1"),
        ({"activation_checkpointing": "all"}, "expected none, selective or block"),
        ({"timeout": 0.0}, "timeout=0.0: expected seconds, above 0"),
        ({"timeout": float("inf")}, "timeout=inf: expected seconds, .* at most"),
        ({"timeout": float("nan")}, "timeout=nan"),
    ],
)
def test_wrong_settings_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DistributedArgs(**values)


def test_the_precision_is_what_was_asked_for() -> None:
    cpu = torch.device("cpu")
    assert pick_dtype("fp64", cpu) == torch.float64
    with pytest.raises(UserError, match="dtype=fp16: expected auto, bf16, fp32, fp64"):
        pick_dtype("fp16", cpu)
    with precision(torch.bfloat16, cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    with precision(torch.float32, cpu):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_freed_memory_is_used_again_without_new_pages() -> None:
    code = """
import resource, torch
from lingua.distributed import pick_device
def fewest_faults():
    counts = []
    for _ in range(10):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(16 * 2**20)  # 64 MB: 16,384 pages of 4 KB
        counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(counts)
print(fewest_faults(), pick_device(), fewest_faults())
"""
    done = run_command([sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    plain, _, kept = done.stdout.split()
    if int(plain) < 16384:
        pytest.skip("huge pages, or an allocator of its own: there is nothing to keep")
    assert int(kept) < 100


def test_a_way_to_compile_that_is_not_there() -> None:
    with pytest.raises(UserError, match="=reduce-overhead: expected one of default, max-autotune-no-cudagraphs"):
        DistributedArgs(compile_mode="reduce-overhead")


def test_the_way_to_compile_reaches_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []

    def compiler(forward: Any, **options: Any) -> Any:
        modes.append(options["mode"])
        return forward

    monkeypatch.setattr(torch, "compile", compiler)
    args = DistributedArgs(compile_mode="max-autotune-no-cudagraphs")
    with torch.device("meta"):
        model = tiny()
    parallelize(model, World(torch.device("cpu")), args, torch.float32, True)
    assert modes == ["max-autotune-no-cudagraphs"] * 3  # two blocks and the predictor's
