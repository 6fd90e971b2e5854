from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.distributed import DistributedArgs, World, parallelize
from lingua.flops import ForwardFlops, device_peak, peak_flops, stack_flops, utilization
from lingua.masking import complementary_views, split_positions
from lingua.predictor import PredictorArgs

SHAPE = {"dim": 32, "n_layers": 3, "n_heads": 2, "vocab_size": 97}
ROWS, SEQ = 4, 20


def counted(model: torch.nn.Module, *calls: tuple) -> tuple[int, int]:
    """FLOPs of the forward pass and of the whole training pass, as PyTorch counts the operations it runs."""
    counter = FlopCounterMode(display=False)
    losses = []
    with counter, sdpa_kernel(SDPBackend.MATH):  # fused kernels on the CPU are not in its table
        for call in calls:
            losses.append(model(*call).loss)
        forward = counter.get_total_flops()
        for loss in losses:
            loss.backward()
    return forward, counter.get_total_flops()


@pytest.mark.parametrize("ratio", [0.2, 0.5])
def test_bert_costs_what_pytorch_counts(ratio: float) -> None:
    model = Bert(BertArgs(**SHAPE))
    tokens = torch.randint(0, 97, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    expected = model.row_flops(SEQ, ratio) * ROWS
    forward, training = counted(model, (tokens, tokens, split_positions(torch.arange(ROWS), SEQ, ratio, 0)))
    # The loss makes its gradients, two more products of the logits' size, in its forward pass.
    assert forward == expected.linear + expected.attention + 3 * expected.head
    assert training == expected.training


@pytest.mark.parametrize("complementary", [True, False])
@pytest.mark.parametrize("ratio", [0.5, 0.3])
@pytest.mark.parametrize("width", [-1, 16])
def test_crossbert_costs_what_pytorch_counts(complementary: bool, ratio: float, width: int) -> None:
    model = CrossBert(CrossBertArgs(**SHAPE, predictor=PredictorArgs(dim=width, n_layers=2)))
    tokens = torch.randint(0, 97, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    make_views = complementary_views if complementary else lambda *args: [split_positions(*args)]
    views = make_views(torch.arange(ROWS), SEQ, ratio, 0)
    expected = model.row_flops(SEQ, ratio, complementary) * ROWS
    _, training = counted(model, *((tokens, view) for view in views))
    assert training == expected.training


@pytest.mark.parametrize("mode", ["none", "selective", "block"])
def test_recomputation_costs_what_pytorch_counts(mode: str) -> None:
    with torch.device("meta"):
        model = CrossBert(CrossBertArgs(**SHAPE, predictor=PredictorArgs(n_layers=2)))
    parallelize(model, World(torch.device("cpu")), DistributedArgs(activation_checkpointing=mode), torch.float32, False)
    tokens = torch.randint(0, 97, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    forward = model.row_flops(SEQ, 0.5, complementary=True) * ROWS
    _, hardware = counted(model, (tokens, complementary_views(torch.arange(ROWS), SEQ, 0.5, 0)[0]))
    figures = utilization(forward, paper=0.0, seconds=1.0, peak=1.0, recompute=mode)
    assert hardware == figures["hfu"]
    assert (hardware > figures["mfu"]) == (mode == "block")


def test_shared_keys_wide_heads_and_an_own_output_cost_what_pytorch_counts() -> None:
    more = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 12, "biases": ["qkv", "wo", "ffn"], "tied": False}
    model, plain = Bert(BertArgs(**SHAPE | more)), Bert(BertArgs(**SHAPE))
    tokens = torch.randint(0, 97, (ROWS, SEQ), generator=torch.Generator().manual_seed(0))
    expected = model.row_flops(SEQ, 0.2) * ROWS
    _, training = counted(model, (tokens, tokens, split_positions(torch.arange(ROWS), SEQ, 0.2, 0)))
    assert training == expected.training
    # By hand: 4 heads of 12 make 48 channels; q, k and v have the rows of 8 heads.
    block = 32 * 8 * 12 + 48 * 32 + 3 * 32 * 256
    assert model.flops_per_token(SEQ) == 6 * 3 * block + 12 * 48 * 3 * SEQ
    assert model.parameter_counts()["full"] == 3 * block + 2 * 97 * 32
    assert plain.parameter_counts()["full"] == 3 * (4 * 32 * 32 + 3 * 32 * 256) + 97 * 32
    cross = CrossBert(CrossBertArgs(**SHAPE | more, predictor=PredictorArgs(n_layers=2)))
    views = complementary_views(torch.arange(ROWS), SEQ, 0.5, 0)
    _, training = counted(cross, *((tokens, view) for view in views))
    assert training == (cross.row_flops(SEQ, 0.5, True) * ROWS).training


def test_by_hand() -> None:
    """The paper's single-scale model, width 768, FFN 2048: a block has 4 x 768^2 + 3 x 768 x 2048 weights."""
    with torch.device("meta"):
        model = Bert(BertArgs(768, 28, 12, 50265))
        cross = CrossBert(CrossBertArgs(768, 28, 12, 50265, predictor=PredictorArgs(n_layers=6)))
    weights = 4 * 768 * 768 + 3 * 768 * 2048
    row = model.row_flops(512, 0.2)
    w2 = 2 * 768 * 2048  # FLOPs a position of the product that ends a block
    assert row == ForwardFlops(
        2 * 28 * weights * 512, 28 * 4 * 768 * 512**2, head=2 * 768 * 50265 * 102, closing=28 * w2 * 512
    )
    # The paper's F counts the same blocks and attention, and no head.
    assert model.flops_per_token(512) * 512 == 3 * (row.linear + row.attention)
    both = cross.row_flops(512, 0.5, complementary=True)
    assert both == ForwardFlops(
        linear=2 * 2 * (28 + 6) * weights * 256,
        attention=2 * (28 + 6) * 4 * 768 * 256**2,
        head=2 * 768 * 50265 * 512,
        closing=2 * (28 + 6) * w2 * 256,
    )
    single = cross.row_flops(512, 0.25, complementary=False)
    kv = 2 * 768 * 768  # of each predictor block, on the 384 visible positions
    assert single == ForwardFlops(
        linear=2 * 28 * weights * 384 + 2 * 6 * ((weights - kv) * 128 + kv * 384),
        attention=4 * 768 * (28 * 384**2 + 6 * 128 * 384),
        head=2 * 768 * 50265 * 128,
        closing=w2 * (28 * 384 + 6 * 128),
    )


def test_utilization_by_hand() -> None:
    forward = ForwardFlops(linear=6e12, attention=2e12, head=1e12, closing=1.5e12)  # training: 27e12
    plain = utilization(forward, paper=24e12, seconds=3.0, devices=2)
    assert plain == pytest.approx({"tflops": 4.5, "paper_tflops": 4.0})
    known = utilization(forward, 24e12, 3.0, devices=2, peak=10e12)
    assert known == pytest.approx({**plain, "mfu": 0.45, "hfu": 0.45, "paper_mfu": 0.4})
    assert utilization(forward, 24e12, 3.0, 2, 10e12, "block")["hfu"] == pytest.approx(33.5 / 60)
    assert utilization(forward, 24e12, 3.0, 2, 10e12, "selective")["hfu"] == pytest.approx(27 / 60)
    assert forward * 3 - forward == forward + forward


def test_the_meta_device_has_the_same_figure() -> None:
    real = Bert(BertArgs(**SHAPE))
    with torch.device("meta"):
        meta = Bert(BertArgs(**SHAPE))
    assert stack_flops(real.encoder.layers, 32, 7) == stack_flops(meta.encoder.layers, 32, 7)


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312.0),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.4),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H100 NVL", torch.float16, 835.5),
        ("NVIDIA H200", torch.bfloat16, 989.4),
        ("NVIDIA H200 NVL", torch.bfloat16, 835.5),
        ("NVIDIA GH200 480GB", torch.bfloat16, 989.4),
        ("NVIDIA GH200 144G HBM3e", torch.float32, 66.9),
        ("NVIDIA B200", torch.bfloat16, 2250.0),
        ("NVIDIA GB200", torch.bfloat16, 2500.0),
        ("NVIDIA L40S", torch.bfloat16, 362.05),
        ("NVIDIA A10", torch.bfloat16, 125.0),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("Tesla V100-SXM2-32GB", torch.float16, 125.0),
        ("Tesla V100-SXM2-32GB", torch.bfloat16, None),
        ("Tesla T4", torch.float16, 65.0),
        ("AMD Instinct MI250X", torch.bfloat16, 191.5),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
        ("NVIDIA H20", torch.bfloat16, 148.0),
        # other devices whose names look alike
        ("NVIDIA A10G", torch.bfloat16, None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 D", torch.bfloat16, None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16, None),
        ("NVIDIA H200", torch.float64, None),
        ("Some Accelerator 9000", torch.bfloat16, None),
    ],
)
def test_peaks_by_device_name(name: str, dtype: torch.dtype, tflops: float | None) -> None:
    peak = peak_flops(name, dtype)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))


def test_an_unknown_gpu_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with mock.patch("torch.cuda.get_device_name", return_value="Some Accelerator 9000"):
        assert device_peak(torch.device("cuda"), torch.bfloat16) is None
    assert "Some Accelerator 9000 in torch.bfloat16" in caplog.text
    with mock.patch("torch.cuda.get_device_name", return_value="NVIDIA H200"):
        assert device_peak(torch.device("cuda", 0), torch.bfloat16) == 989.4e12
    caplog.clear()
    assert device_peak(torch.device("cpu"), torch.float32) is None
    assert caplog.text == ""
