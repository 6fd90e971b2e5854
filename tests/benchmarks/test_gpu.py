"""benchmarks.gpu without a GPU: every part runs at toy size, and what it makes of a trace that a GPU would leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu import BARS, KINDS, GpuArgs, bars, by_kind, main
from lingua.errors import UserError
from tests.benchmarks.test_gpu_smoke import needs_no_gpu, train_here


def test_kernels_by_kind_and_idling_by_hand() -> None:
    def kernel(name: str, start: float, duration: float, cat: str = "kernel") -> dict:
        return {"cat": cat, "name": name, "ts": start, "dur": duration}

    found = by_kind(
        [
            kernel("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_NNT", 1000, 4000),
            kernel("void at::native::vectorized_elementwise_kernel<4, ...>", 5000, 1000),
            kernel("void cutlass::device_kernel<flash::FlashAttnBwdSm90<...> >", 8000, 2000),  # not a product
            kernel("Memcpy HtoD (Pinned -> Device)", 8500, 500, cat="gpu_memcpy"),  # beside it
            kernel("triton_red_fused__to_copy_mean_mul_0", 10000, 250),
            kernel("ampere_something_new", 10250, 125),
            kernel("aten::mm", 0, 99999, cat="cpu_op"),
            {"name": "no category", "ts": 0},
        ]
    )
    assert found["ms"] == {
        "matrix products": 4.0,
        "attention": 2.0,
        "idle": 2.0,  # from 6 to 8 ms
        "element by element and reductions": 1.0,
        "copies": 0.5,
        "fused by the compiler": 0.25,
        "others": 0.12,
    }
    assert found["largest besides products"] == "attention"
    assert found["others"] == {"ampere_something_new": 0.12}
    assert by_kind([kernel("aten::mm", 0, 1, cat="cpu_op")]) == "no kernel of a GPU in the trace"


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, ...> >", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_3_64x64x64", "attention"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matrix products"),
        ("void at::native::multi_tensor_apply_kernel<..., AdamMathFunctor<float> >", "optimizer and gradient norm"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float>", "softmax at the output"),
        ("triton_poi_fused_cat_mul_neg_silu_3", "fused by the compiler"),
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >", "element by element and reductions"),
    ],
)  # fmt: skip
def test_names_of_real_kernels(name: str, kind: str) -> None:
    trace = [{"cat": "kernel", "name": name, "ts": 0, "dur": 1000}]
    assert next(iter(by_kind(trace)["ms"])) == kind
    assert kind in KINDS


def test_a_bar_is_met_at_its_bound_only() -> None:
    found = {bar["name"]: bar["met"] for bar in bars({"bert: tokens a second": 250e3, "unasked": 1.0})}
    assert found == {"bert: tokens a second": True}
    (bar,) = bars({"crossbert: tokens a second": 389e3})
    assert not bar["met"]


@needs_no_gpu
def test_what_begins_too_late_is_left_out_and_said_to_be(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    main(GpuArgs(str(out), minutes=0))
    result = json.loads(out.read_text())
    assert {part["not run"] for part in result["parts"].values()} == {"0 minutes were over"}
    assert result["bars"] == []


@needs_no_gpu
def test_a_part_that_fails_is_named_and_the_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> dict:
        raise OSError("no such kernel")

    monkeypatch.setattr(gpu, "parts", lambda bench: {"whole": lambda: {"n": 1}, "broken": broken})
    out = tmp_path / "out.json"
    with pytest.raises(UserError, match=rf"1 parts failed \(broken\), the first by OSError: no such kernel: see {out}"):
        main(GpuArgs(str(out)))
    result = json.loads(out.read_text())
    assert result["parts"]["whole"]["n"] == 1
    assert "no such kernel" in result["parts"]["broken"]["failed"]
    with pytest.raises(UserError, match="minutes=-1: expected"):
        GpuArgs(str(out), minutes=-1)


@needs_no_gpu
@pytest.mark.slow
def test_all_parts_at_toy_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "train", train_here_with_its_config)
    out = tmp_path / "out.json"
    main(GpuArgs(str(out), compile=False, minutes=60))
    result = json.loads(out.read_text())
    assert not [part for part, found in result["parts"].items() if "failed" in found or "not run" in found]
    assert set(BARS) <= set(result["figures"])
    size = gpu.TOY_SIZE
    for name in ("bert", "crossbert"):
        part = result["parts"][name]
        assert part["losses"][-1] < part["losses"][0]
        assert len(part["view_tokens_per_second"]) == 4  # of six records: not the first, not the traced one
        rows = result["parts"][f"batch size, {name}"]
        assert rows[f"{size.rows} rows"]["tokens_per_second"] > 0
    # Tokens a FLOP, by the models' own count.
    cost = {n: gpu.ours(n, size, torch.device("cpu"), torch.float32, False) for n in ("bert", "crossbert")}
    a_token = {n: contestant.all_flops / contestant.tokens for n, contestant in cost.items()}
    for name, flops in a_token.items():
        assert result["figures"][f"{name}: FLOPs a token"] == pytest.approx(flops, rel=1e-3)
    assert str(tmp_path) not in out.read_text()


def train_here_with_its_config(app: str, words: list[str]) -> Path:
    """As the command: the folder of the run is not the first word."""
    run = next(word for word in words if word.startswith("dump_dir="))
    return train_here(app, [run, *words])
