from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from apps.crossbert.model import CrossBertArgs
from lingua.attention import attention, check_attention, document_mask, pack, round_up
from lingua.errors import UserError
from lingua.masking import documents, same_document
from lingua.predictor import PredictorArgs
from lingua.rotary import rotary_angles
from lingua.stats import attention_statistics
from lingua.transformer import EncoderBlock, TransformerArgs
from tests.support import run_app, tiny_words


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """One query, one head at a time."""
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        for s in range(q.shape[1]):
            for h in range(q.shape[2]):
                scores = k[b, :, h] @ q[b, s, h] / q.shape[-1] ** 0.5
                if mask is not None:
                    scores = scores.masked_fill(~mask[b, 0, min(s, mask.shape[2] - 1)], -torch.inf)
                out[b, s, h] = scores.softmax(0) @ v[b, :, h]
    return out


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.03)]
)
def test_every_path_equals_plain_loops_in_float64(dtype: torch.dtype, tolerance: float, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 3, 8, generator=generator).to(dtype)
    k, v = (torch.randn(2, 7, 3, 8, generator=generator).to(dtype) for _ in range(2))
    mask = (torch.arange(7) < torch.tensor([7, 4])[:, None])[:, None, None, :] if masked else None
    expected = reference(q.double(), k.double(), v.double(), mask)
    out = attention(q, k, v, mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=tolerance)


def test_a_query_that_may_look_nowhere_gets_zeros_and_finite_gradients() -> None:
    q, k, v = (torch.randn(1, 2, 2, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[True, False], [False, False]])[None, None]
    out = attention(q, k, v, mask)
    assert (out[:, 1] == 0).all()
    torch.testing.assert_close(out[:, 0], v[:, 0])
    out.sum().backward()
    assert (q.grad[:, 1] == 0).all()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def documents_of_views(seed: int, B: int = 3, S: int = 40, hidden: int = 15) -> tuple[torch.Tensor, torch.Tensor]:
    """Documents of hidden and of visible positions; some documents are of one side only."""
    generator = torch.Generator().manual_seed(seed)
    documents_BS = documents((torch.rand(B, S, generator=generator) > 0.2).long(), start_id=0)
    order_BS = torch.rand(B, S, generator=generator).argsort(dim=1)
    hidden_BM, visible_BT = order_BS[:, :hidden].sort(dim=1).values, order_BS[:, hidden:].sort(dim=1).values
    hidden_BM, visible_BT = documents_BS.gather(1, hidden_BM), documents_BS.gather(1, visible_BT)
    visible_BT[0, :5], hidden_BM[0, :3] = 3, 1  # the first queries of all have no key
    return hidden_BM.sort(dim=1).values, visible_BT.sort(dim=1).values


def inputs(S: int, T: int, K: int = 16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(3, n, 2, K, generator=generator, dtype=torch.float64) for n in (S, T, T)]


def slow_varlen(q_NHK, k_NHK, v_NHK, starts_q, starts_k, longest_q, longest_k):
    """What ``varlen_attn`` says it computes: each sequence by itself. It may not be longer than was promised."""
    parts = []
    for i in range(len(starts_q) - 1):
        q, (k, v) = q_NHK[starts_q[i] : starts_q[i + 1]], (x[starts_k[i] : starts_k[i + 1]] for x in (k_NHK, v_NHK))
        assert len(q) <= longest_q
        assert len(k) <= longest_k
        assert len(k) >= min(1, len(q))
        if len(q):
            parts.append(attention(q[None], k[None], v[None])[0])
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert (starts_q[0], starts_k[0], starts_q[-1], starts_k[-1]) == (0, 0, len(q_NHK), len(k_NHK))
    return torch.cat(parts)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", ["self", "cross"])
def test_documents_one_after_another_give_what_the_mask_gives(kind: str, seed: int, monkeypatch) -> None:
    queries, keys = documents_of_views(seed)
    queries = keys if kind == "self" else queries
    q, k, v = (x.requires_grad_() for x in inputs(queries.shape[1], keys.shape[1]))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", slow_varlen)
    mask = document_mask("varlen", queries, keys)
    assert len(mask.layout.keys) - 1 in {2**n for n in range(10)}
    expected = attention(q, k, v, document_mask("sdpa", queries, keys))
    out = attention(q, k, v, mask)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    expected, found = (torch.autograd.grad((y * weights).sum(), (q, k, v)) for y in (expected, out))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if kind == "cross":
        assert (out == 0).all(dim=(2, 3)).any()
        assert torch.equal((out == 0).all(dim=(2, 3)), mask.blind_BS)


@pytest.mark.parametrize("kind", ["self", "cross"])
@torch.no_grad()
def test_flex_gives_what_the_mask_gives(kind: str) -> None:
    queries, keys = documents_of_views(0)
    queries = keys if kind == "self" else queries
    q, k, v = (x.float() for x in inputs(queries.shape[1], keys.shape[1]))
    out = attention(q, k, v, document_mask("flex", queries, keys))
    torch.testing.assert_close(out, attention(q, k, v, document_mask("sdpa", queries, keys)), rtol=0, atol=1e-5)


def test_flex_skips_blocks_without_a_common_document() -> None:
    documents_BS = torch.arange(4).repeat_interleave(128)[None]
    layout = document_mask("flex", documents_BS, documents_BS).layout
    assert torch.equal(layout.to_dense()[0, 0], torch.eye(4, dtype=layout.to_dense().dtype))


def test_xformers_mask_gives_what_the_mask_gives() -> None:
    """Its kernels need a GPU, so its own picture of the mask is looked at."""
    pytest.importorskip("xformers")
    for seed in range(5):
        queries, keys = documents_of_views(seed)
        mask = document_mask("xformers", queries, keys)
        bias = mask.layout.materialize((1, 1, queries.numel(), keys.numel()))[0, 0]
        allowed = (bias == 0).unflatten(0, queries.shape) & ~mask.blind_BS[:, :, None]
        for b in range(len(queries)):
            inside = torch.zeros_like(allowed[b])
            inside[:, b * keys.shape[1] : (b + 1) * keys.shape[1]] = mask.dense()[b, 0]
            assert torch.equal(allowed[b], inside)


@pytest.mark.parametrize("backend", ["flex", "varlen", "xformers"])
def test_every_backend_knows_its_mask(backend: str, monkeypatch) -> None:
    """The statistics ask for it."""
    if backend == "xformers":
        pytest.importorskip("xformers")
    queries, keys = documents_of_views(0)
    mask, expected = document_mask(backend, queries, keys), same_document(queries, keys)
    assert torch.equal(mask.dense(), expected)
    q, k, _ = inputs(queries.shape[1], keys.shape[1])
    assert attention_statistics(q, k, mask) == attention_statistics(q, k, expected)


def test_the_default_on_a_cpu_is_the_plain_mask() -> None:
    queries, keys = documents_of_views(0)
    assert torch.equal(document_mask("auto", queries, keys), same_document(queries, keys))


def test_compiled_code_meets_few_numbers_of_documents(monkeypatch) -> None:
    """Batches of 20 to 31 documents are one shape."""
    shapes = set()
    for seed in range(20):
        keys = documents_of_views(seed)[1]
        count = len((keys + 1000 * torch.arange(3)[:, None]).unique())
        starts, _ = pack(keys, keys)
        assert len(starts.keys) == count + 1
        shapes.add(len(round_up(starts).keys) - 1)
        assert round_up(starts).keys[-1] == keys.numel()
    assert shapes <= {16, 32}


CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GPU_SIDE = {"compile": False, "isolated": True, "device": CUDA, "dtype": torch.bfloat16, "head_sizes": [64]}


@pytest.mark.parametrize(
    ("backend", "changes", "message"),
    [
        (
            "flex",
            {"device": CPU},
            "flex cannot run here: FlexAttention has no backward pass for cpu. Use .*auto or sdpa",
        ),
        ("varlen", {"device": CPU}, "varlen cannot run here: varlen_attn has no kernel for cpu. Use .*auto or sdpa"),
        ("varlen", {"isolated": False}, "data.isolate_documents is false: .* Use model.attention=auto, or data"),
        ("flex", {"dtype": torch.float64}, "does not compute in float64. Use model.attention=sdpa"),
        ("auto", {"dtype": torch.float64}, "attention=auto cannot run here: .* Use model.attention=sdpa"),
        ("auto", {"head_sizes": [64, 8]}, "heads of 16 and more, the model has 8. Use model.attention=sdpa"),
        ("varlen", {"head_sizes": [64, 20]}, r"multiple of 8 up to 256, the model has \[20, 64\]"),
        ("varlen", {"dtype": torch.float32}, "computes in bf16, the run in float32. Use model.attention=flex or sdpa"),
    ],
)
def test_what_cannot_run_is_said(backend: str, changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_attention(backend, **{**GPU_SIDE, **changes})


def test_what_can_run_is_let_through() -> None:
    check_attention("flex", **GPU_SIDE)
    for backend in ("auto", "sdpa"):
        for device in (CPU, CUDA):
            check_attention(backend, **{**GPU_SIDE, "device": device})
            check_attention(backend, False, [2], device, torch.float64, True)


def test_xformers_is_optional(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "xformers.ops", None)
    with pytest.raises(UserError, match=r"xFormers is not there .*pip install -r requirements-xformers.txt"):
        check_attention("xformers", **GPU_SIDE)
    monkeypatch.setitem(sys.modules, "xformers.ops", mock.Mock())
    check_attention("xformers", **GPU_SIDE)
    with pytest.raises(UserError, match="xFormers has no kernel for cpu"):
        check_attention("xformers", **{**GPU_SIDE, "device": CPU})
    with pytest.raises(UserError, match="compile=true would never stop compiling"):
        check_attention("xformers", **{**GPU_SIDE, "compile": True})


@pytest.mark.parametrize("app", ["bert", "crossbert"])
def test_a_run_refuses_before_a_model_is_built(app: str, corpus: Path, tmp_path: Path) -> None:
    words = tiny_words(app, corpus, tmp_path, model__attention="flex", data__isolate_documents="true")
    with (
        mock.patch("lingua.transformer.Encoder.__init__", side_effect=AssertionError),
        pytest.raises(UserError, match=r"model\.attention=flex cannot run here"),
    ):
        run_app(app, words)
    with pytest.raises(UserError, match=r"model\.attention=fast: expected one of auto, sdpa, flex, varlen, xformers"):
        run_app(app, tiny_words(app, corpus, tmp_path, model__attention="fast"))


def test_the_predictors_heads_count_too() -> None:
    assert CrossBertArgs(dim=64, n_heads=2, predictor=PredictorArgs(dim=32, n_heads=4)).head_sizes() == [32, 8]
    assert CrossBertArgs(dim=64, n_heads=2).head_sizes() == [32, 32]


@torch.no_grad()
def test_flex_in_a_block_is_one_graph_for_all_batches() -> None:
    """Traced, but not made into kernels: those that PyTorch makes for a CPU are wrong on transposed inputs."""
    block = EncoderBlock(TransformerArgs(dim=32, n_heads=2, n_layers=1, vocab_size=9))
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(0))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend=counter)
    for seed in range(3):
        documents_BS = documents_of_views(seed)[1]
        x_BSD = torch.randn(*documents_BS.shape, 32, generator=torch.Generator().manual_seed(seed))
        rotary = rotary_angles(torch.arange(documents_BS.shape[1]), 16, 10000.0)
        expected = block(x_BSD, rotary, document_mask("sdpa", documents_BS, documents_BS))
        out = compiled(x_BSD, rotary, document_mask("flex", documents_BS, documents_BS))
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-4)
    assert counter.frame_count == 1


@torch.no_grad()
def test_varlen_in_a_block_is_one_graph_for_batches_of_like_numbers_of_documents(monkeypatch) -> None:
    """Traced with its own fake kernel; there is none to run on a CPU."""
    graphs = []

    def only_trace(graph: torch.fx.GraphModule, example: list) -> Callable:
        graphs.append(graph)
        return lambda *inputs: (torch.zeros(3, 25, 32),)

    block = EncoderBlock(TransformerArgs(dim=32, n_heads=2, n_layers=1, vocab_size=9))
    compiled = torch.compile(block, fullgraph=True, dynamic=False, backend=only_trace)
    counts = set()
    for seed in range(8):
        documents_BS = documents_of_views(seed)[1]
        counts.add(len(pack(documents_BS, documents_BS)[0].keys))
        rotary = rotary_angles(torch.arange(25), 16, 10000.0)
        compiled(torch.zeros(3, 25, 32), rotary, document_mask("varlen", documents_BS, documents_BS))
    assert len(counts) > 2
    assert len(graphs) <= 2
    assert "varlen" in str(graphs[0].graph)
