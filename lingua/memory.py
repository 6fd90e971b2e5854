"""How much memory training takes on a device, by what it goes to: an estimate, made before anything runs.

Per block and token, what autograd keeps is counted from the layers of :mod:`lingua.transformer`: the inputs of norms
and products, queries and keys with their rotary positions, the attention's output, and the arrays of SwiGLU. Fused
attention keeps no probabilities. With FSDP2, blocks are gathered in the compute precision, one beside the one that
runs; what is outside of them, the embedding above all, is gathered in float32 and stays. The caches of allocators and
the contexts of devices (a GB or so on a GPU) are not in it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from torch import nn

from lingua.loss import CACHED_LOGITS, CHUNK_ROWS
from lingua.transformer import ffn_width

MODES = ("none", "selective", "block")  # of activation checkpointing


@dataclass
class Memory:
    """Bytes on one device at the moment when most are in use."""

    weights: float  # float32, this rank's part
    optimizer: float  # AdamW's two moments
    gradients: float  # float32; those that are there at that moment
    copies: float  # weights in the compute precision, and those gathered from other ranks
    activations: float  # what the backward pass needs of one micro-batch
    loss: float  # logits of a chunk, and the gradients that the loss makes at once

    @property
    def total(self) -> float:
        """All of them."""
        return sum(astuple(self))


@dataclass
class Spread:
    """How a run uses its devices."""

    ranks: int = 1  # 1: nothing is wrapped
    shard: int = 1  # ranks that share one copy of the weights
    checkpointing: str = "none"  # distributed.activation_checkpointing
    reshard: bool = True  # distributed.reshard_after_forward


def training_memory(
    model: nn.Module, config: Any, micro_rows: int, passes: int, spread: Spread, device: str = "cuda"
) -> Memory:
    """Peak of a training step.

    Args:
        model: of an app, also on the meta device. An ELECTRA's generator is not counted.
        config: the app's.
        micro_rows: rows in one forward and backward pass.
        passes: backward passes of a rank in one step: with several, gradients are there during forward passes, and
            with FSDP2 whole ones, as they are summed over the ranks in the last.
        device: its type; it decides how many logits there are at once.
    """
    stacks = [stack for stack in model.modules() if isinstance(stack, nn.ModuleList)]
    blocks = [block for stack in stacks for block in stack if hasattr(block, "ffn")]
    in_blocks = [sum(p.numel() for p in block.parameters()) for block in blocks]
    parameters = sum(p.numel() for p in model.parameters())
    outside, largest = parameters - sum(in_blocks), max(in_blocks)
    wide = 8 if config.dtype == "fp64" else 4
    low = 2 if config.dtype in ("auto", "bf16") else wide
    whole = wide * parameters
    weights = whole / spread.shard
    kept, one_block = activations(config, micro_rows, low, wide, spread.checkpointing)
    if spread.ranks == 1:
        copies = low * sum(in_blocks) if low < wide else 0
        whole_gradients = False
    else:
        gathered = 2 * largest if spread.reshard else sum(in_blocks)
        copies = wide * outside + low * gathered
        whole_gradients = passes > 1 and spread.shard > 1
    matrix = model.encoder.embedding.weight  # type: ignore[union-attr]
    one_matrix = wide * matrix.numel()
    gradients = whole if whole_gradients else weights
    before = gradients if passes > 1 else 0.0
    unreduced = wide * (outside + 2 * largest) if spread.ranks > 1 and not whole_gradients else 0.0
    static = (weights, 2 * weights)
    moments = (
        # the loss, above all activations
        Memory(*static, before, copies, kept, loss_bytes(matrix.shape, config, micro_rows, low, wide, device)),
        # the backward pass of the last block: what it computes again, and gradients on their way; the output matrix's
        # gradient twice, as the loss has made it and scaled
        Memory(*static, before, copies, kept + one_block, 2 * one_matrix),
        # the end of the backward pass: all gradients, the embedding's twice, from the loss and from the input
        Memory(*static, gradients + unreduced, copies, one_block, one_matrix),
    )
    return max(moments, key=lambda memory: memory.total)


def backward_passes(config: Any, accumulation: int) -> int:
    """Of a rank in one step of ``accumulation`` micro-batches."""
    masking = config.masking
    views = 2 if getattr(masking, "complementary", False) else 1
    return accumulation * views // _views_at_once(config)


def loss_bytes(matrix: tuple[int, ...], config: Any, micro_rows: int, low: int, wide: int, device: str) -> float:
    """What :func:`lingua.loss.cross_entropy` holds besides its inputs, at its peak in the forward pass.

    Args:
        matrix: shape of the output matrix [V, D].
        low, wide: bytes of a number in the compute precision, and of one that is not reduced.
    """
    vocab, dim = matrix
    share = config.masking.hidden_ratio * getattr(config.masking, "predicted_share", 1.0)
    objectives = [getattr(config, "objective", ""), *(s.objective for s in getattr(config, "stages", {}).values())]
    share = 1.0 if "clm" in objectives else share  # every token but a row's first is predicted
    positions = config.data.seq_len * share * micro_rows * _views_at_once(config)
    reduced = low if low < wide else 0
    logits = min(positions, CHUNK_ROWS[device]) * vocab
    at_once = min(logits, max(vocab, CACHED_LOGITS)) if device == "cpu" else logits  # go through the softmax
    softmax = at_once * (wide if reduced or device != "cpu" else 0)  # a CPU's is in place, if it can be
    of_matrix = vocab * dim * (wide + low + reduced)  # its gradient, a chunk's part of it, its copy
    return logits * low + softmax + of_matrix + positions * dim * (wide + reduced)


def activations(config: Any, micro_rows: int, low: int, wide: int, checkpointing: str) -> tuple[float, float]:
    """Bytes kept for the backward pass of one micro-batch, and those that come and go in that of its largest block."""
    model, masking = config.model, config.masking
    predictor = getattr(model, "predictor", None)
    hidden = masking.hidden_ratio if predictor is not None else 0.0
    tokens = micro_rows * config.data.seq_len * _views_at_once(config)
    dim, visible = model.dim, tokens * (1 - hidden)
    head = dim // model.n_heads if model.head_dim == -1 else model.head_dim
    q, kv = model.n_heads * head, (model.n_heads if model.n_kv_heads == -1 else model.n_kv_heads) * head
    repeated = 2 * q if kv < q else 0
    encoder = _Kept(
        stream=visible * dim,
        normed=visible * dim,
        products=visible * (q + 2 * kv + q),
        rotated=visible * (q + kv + repeated),
        head_norms=visible * (q + kv) * model.qk_norm,
        ffn=visible * _ffn(model.ffn_dim, dim),
    )
    stacks = [(encoder, model.n_layers)]
    if predictor is not None:
        width = dim if predictor.dim == -1 else predictor.dim
        queries = tokens * hidden * getattr(masking, "predicted_share", 1.0)
        among = queries * width * predictor.self_attention  # of a second attention, among the hidden positions
        own = _Kept(
            stream=queries * width + among / 2,
            normed=queries * width + among / 2,
            products=queries * 2 * width + visible * 2 * width + 4 * among,
            rotated=queries * width + visible * width + 2 * among,
            head_norms=(queries * width + visible * width + 2 * among) * model.qk_norm,
            ffn=queries * _ffn(-1, width),
            source=visible * dim if low < wide else 0.0,
        )
        stacks.append((own, predictor.n_layers))
    kept = sum(n * block.bytes(low, wide, checkpointing) for block, n in stacks)
    ends = 2 * wide * tokens * dim  # inputs of the final norms, and what comes out of them
    again = [b.bytes(low, wide, "none") - b.bytes(low, wide, checkpointing) for b, _ in stacks]  # before its backward
    on_their_way = [low * 3 * b.ffn + wide * 2 * b.stream for b, _ in stacks]  # gradients
    return kept + ends, max(map(sum, zip(again, on_their_way, strict=True)))


@dataclass
class _Kept:
    """Numbers kept by one block, by kind."""

    stream: float  # the residual stream at one of the two norms
    normed: float  # what a norm gives to a product
    products: float  # q, k, v, and the attention's output
    rotated: float  # q and k with rotary positions
    ffn: float  # width of SwiGLU, for all tokens
    head_norms: float = 0.0  # q and k before the norms of their heads
    source: float = 0.0  # what cross-attention reads, in the compute precision

    def bytes(self, low: int, wide: int, checkpointing: str) -> float:
        if checkpointing == "block":
            return wide * self.stream
        outputs = self.products + 2 * self.ffn  # of products and of attention
        if checkpointing == "selective":
            return wide * self.stream + low * (outputs + 2 * self.stream)
        reduced = 2 * low if low < wide else 0  # the products' output, and what attention takes: copies then
        norms = wide * 2 * self.stream + (wide + reduced) * self.head_norms
        return norms + low * (2 * self.normed + outputs + self.rotated + 2 * self.ffn + self.source)


def _ffn(width: int, dim: int) -> int:
    return ffn_width(dim) if width == -1 else width


def _views_at_once(config: Any) -> int:
    """Views of a row in one forward pass: two that hide half of it each pass together."""
    masking = config.masking
    return 2 if getattr(masking, "complementary", False) and masking.hidden_ratio == 0.5 else 1
