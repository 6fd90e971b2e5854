"""What benchmarks.train times: a training step of ours, of ``transformers``' encoders, and the bare matrix products.

All take the same shapes, tokens, vocabulary, optimizer (fused AdamW) and precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from apps.bert.electra import Electra, RtdArgs, step_share
from apps.bert.model import Bert, BertArgs
from apps.crossbert.model import CrossBert, CrossBertArgs
from lingua.distributed import DistributedArgs, World, parallelize, precision
from lingua.flops import ForwardFlops
from lingua.loss import add_up
from lingua.masking import complementary_views, hidden_count, mask_tokens, split_positions
from lingua.optim import OptimArgs, Optimizer
from lingua.predictor import PredictorArgs
from lingua.transformer import ffn_width

SPECIAL_IDS, MASK_ID = (0, 1, 2, 3), 4
RATIOS = {"bert": 0.2, "crossbert": 0.5, "electra": 0.15}


@dataclass(frozen=True)
class Size:
    """Of a model and of one step of it, which is one micro-batch."""

    dim: int
    n_layers: int
    n_heads: int
    predictor_layers: int
    rows: int
    seq_len: int = 512
    vocab_size: int = 50265
    hidden_ratio: float | None = None  # None: as the paper has it for each model

    def ratio(self, kind: str) -> float:
        """Share of positions that a model predicts (of a CrossBERT: in one of its two views)."""
        return RATIOS[kind] if self.hidden_ratio is None else self.hidden_ratio

    def shape(self) -> dict[str, int]:
        """What every model of ours takes."""
        return {name: getattr(self, name) for name in ("dim", "n_layers", "n_heads", "vocab_size")}


@dataclass
class Contestant:
    """One step of training, and what it does.

    ``products`` are the FLOPs of its matrices, logits included and attention not; ``tokens`` are real ones, each view
    of a row counted; ``paper_flops`` are the paper's, of the step.
    """

    name: str
    step: Callable[[], None]
    tokens: int
    products: float = 0.0
    paper_flops: float = 0.0
    all_flops: float = 0.0


def random_rows(size: Size) -> Tensor:
    """Token ids [rows, S], none of them special."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(5, size.vocab_size, (size.rows, size.seq_len), generator=generator)


def products_only(forward: ForwardFlops, rows: int) -> float:
    """Training FLOPs of the matrix products of ``rows`` rows."""
    return 3 * (forward.linear + forward.head) * rows


def ours(
    kind: str,
    size: Size,
    device: torch.device,
    dtype: torch.dtype,
    compile: bool,
    distributed: DistributedArgs | None = None,
) -> Contestant:
    """``bert``, ``electra`` or ``crossbert``, with the parts and in the order of the apps' training loops."""
    with torch.device("meta"):
        if kind == "crossbert":
            predictor = PredictorArgs(n_layers=size.predictor_layers)
            model: nn.Module = CrossBert(CrossBertArgs(**size.shape(), predictor=predictor), SPECIAL_IDS)
        elif kind == "electra":
            model = Electra(BertArgs(**size.shape()), RtdArgs(), SPECIAL_IDS)
        else:
            model = Bert(BertArgs(**size.shape()), SPECIAL_IDS)
    parallelize(model, World(device), distributed or DistributedArgs(), dtype, compile)
    optimizer = Optimizer(model, OptimArgs(lr=1e-4), 10_000)
    tokens_BS = random_rows(size).to(device)
    numbers = iter(range(1, 10_000))
    ratio = size.ratio(kind)

    def batches(index_B: Tensor) -> Iterator[tuple]:
        if kind == "crossbert":
            yield from ((tokens_BS, view) for view in complementary_views(index_B, size.seq_len, ratio, 0))
            return
        view = split_positions(index_B, size.seq_len, ratio, 0)
        inputs_BS = mask_tokens(tokens_BS, view.hidden_BM, MASK_ID, SPECIAL_IDS)
        batch = inputs_BS, tokens_BS, view, torch.ones(len(index_B), device=device)
        yield batch if kind == "bert" else (*batch, index_B, step_share([batch], SPECIAL_IDS))

    def step() -> None:
        number = next(numbers)
        index_B = torch.arange(size.rows, device=device) + number * size.rows
        parts = []
        for batch in batches(index_B):
            with precision(dtype, device):
                part = model(*batch)
            part.loss.backward()
            parts.append(part)
        optimizer.step(number, add_up(parts))

    views = 2 if kind == "crossbert" else 1
    tokens = views * tokens_BS.numel()
    masking: tuple = (ratio, True) if kind == "crossbert" else (ratio,)
    forward = model.row_flops(size.seq_len, *masking)
    paper = model.flops_per_token(size.seq_len, *(masking if kind == "crossbert" else ()))
    return Contestant(
        kind, step, tokens, products_only(forward, size.rows), paper * tokens, forward.training * size.rows
    )


def bare_products(kind: str, size: Size, device: torch.device, dtype: torch.dtype) -> Contestant:
    """The three products of every matrix of a model's step, each at the number of rows it has there: nothing else.

    One matrix in memory for each of the model's, so that they come from as far away.
    """
    rows, S, dim, V = size.rows, size.seq_len, size.dim, size.vocab_size
    width, hidden = ffn_width(dim), hidden_count(S, size.ratio(kind))
    of_block = [(dim, 3 * dim), (dim, dim), (dim, 2 * width), (width, dim)]
    visible, predicted = (2 * rows * (S - hidden), 2 * rows * hidden) if kind == "crossbert" else (rows * S, 0)
    products = [(n_in, n_out, visible) for n_in, n_out in of_block] * size.n_layers
    if kind == "crossbert":
        of_predictor = [(dim, dim, predicted), (dim, 2 * dim, visible), (dim, dim, predicted)]
        of_predictor += [(dim, 2 * width, predicted), (width, dim, predicted)]
        products += of_predictor * size.predictor_layers
    products.append((dim, V, predicted or rows * hidden))
    weights = [torch.randn(n_out, n_in, device=device).mul_(0.02).to(dtype) for n_in, n_out, _ in products]
    inputs = {(n, k): torch.randn(n, k, device=device).to(dtype) for k, m, n in products for k, n in ((k, n), (m, n))}
    outputs = {key: torch.empty_like(x) for key, x in inputs.items()}
    gradients = {weight.shape: torch.empty_like(weight) for weight in weights}

    def step() -> None:
        for weight, (n_in, n_out, n) in zip(weights, products, strict=True):
            torch.mm(inputs[n, n_in], weight.T, out=outputs[n, n_out])
        for weight, (n_in, n_out, n) in zip(reversed(weights), reversed(products), strict=True):
            torch.mm(inputs[n, n_out], weight, out=outputs[n, n_in])
            torch.mm(inputs[n, n_out].T, inputs[n, n_in], out=gradients[weight.shape])

    flops = 3.0 * sum(2 * n_in * n_out * n for n_in, n_out, n in products)
    return Contestant(f"products of {kind}", step, 0, flops)


def peer(
    kind: str, size: Size, device: torch.device, dtype: torch.dtype, compile: bool, as_shipped: bool = False
) -> Contestant:
    """``modernbert``, ``eurobert`` or ``bert`` of ``transformers`` as a masked language model.

    Args:
        as_shipped: logits at all positions, rows of different lengths padded to the longest; else equal lengths, and
            logits at the masked positions where the model has that option (ModernBERT).
    """
    model = _peer_model(kind, size, sparse=not as_shipped).to(device).train()
    if compile:
        for block in next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == size.n_layers):
            block.compile(dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    tokens_BS = random_rows(size).to(device)
    lengths_B = torch.full((size.rows,), size.seq_len, device=device)
    if as_shipped:  # as evenly spread as documents of all lengths up to the longest
        lengths_B = torch.linspace(size.seq_len / size.rows, size.seq_len, size.rows, device=device).long()
    real_BS = torch.arange(size.seq_len, device=device) < lengths_B[:, None]
    view = split_positions(torch.arange(size.rows, device=device), size.seq_len, size.ratio("bert"), 0)
    is_target_BS = torch.zeros_like(real_BS).scatter(1, view.hidden_BM, True) & real_BS
    inputs_BS = torch.where(is_target_BS, MASK_ID, tokens_BS).masked_fill(~real_BS, 1)
    labels_BS = tokens_BS.masked_fill(~is_target_BS, -100)
    mask = {"attention_mask": real_BS.long()} if as_shipped else {}

    def step() -> None:
        with precision(dtype, device):
            loss = model(input_ids=inputs_BS, labels=labels_BS, **mask).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    name = f"{kind} of transformers, {'compiled' if compile else 'eager'}{', as shipped' if as_shipped else ''}"
    return Contestant(name, step, int(real_BS.sum()))


def _peer_model(kind: str, size: Size, sparse: bool) -> nn.Module:
    import transformers

    shape: dict[str, Any] = {
        "vocab_size": size.vocab_size, "hidden_size": size.dim, "num_hidden_layers": size.n_layers,
        "num_attention_heads": size.n_heads, "max_position_embeddings": size.seq_len,
        "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "attn_implementation": "sdpa",
    }  # fmt: skip
    if kind == "modernbert":
        config = transformers.ModernBertConfig(
            **shape, cls_token_id=0, sep_token_id=2, intermediate_size=ffn_width(size.dim), sparse_prediction=sparse
        )
        return transformers.ModernBertForMaskedLM(config)
    if kind == "eurobert":
        config = transformers.EuroBertConfig(
            **shape, num_key_value_heads=size.n_heads, intermediate_size=ffn_width(size.dim),
            head_dim=size.dim // size.n_heads, tie_word_embeddings=True,
        )  # fmt: skip
        return transformers.EuroBertForMaskedLM(config)
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(**shape, **dropout, intermediate_size=4 * size.dim)
    return transformers.BertForMaskedLM(config)
