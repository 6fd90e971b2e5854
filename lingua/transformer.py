"""The backbone: a pre-norm encoder, bidirectional but for its mask, and the layers that other models share with it.

RMSNorm, rotary positions, SwiGLU, no dropout, and no biases unless asked for. Shapes are written as suffixes: B rows,
S positions, M hidden positions, T positions of the keys, D width, H heads, K head size, F feed-forward width,
V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from lingua.attention import BACKENDS, Mask, attention
from lingua.errors import UserError, check_fields
from lingua.hashing import counter_hash, text_hash
from lingua.rotary import RopeScaling, apply_rotary, rotary_angles

BIASES = ("qkv", "wo", "ffn")  # layers that may have them


@dataclass
class TransformerArgs:
    """Shape of the encoder. The defaults are the paper's single-scale model (section 4.1)."""

    dim: int = 768  # width of the residual stream
    n_layers: int = 28  # encoder blocks
    n_heads: int = 12  # attention heads
    vocab_size: int = -1  # -1: that of the tokenizer
    ffn_dim: int = -1  # width of the feed-forward layers; -1: 8/3 of dim, rounded up to a multiple of 256 (the paper's)
    n_kv_heads: int = -1  # heads of keys and values, each for several heads of queries (GQA); -1: n_heads
    head_dim: int = -1  # channels of a head, an even number; -1: dim / n_heads
    rope_theta: float = 10000.0  # base of the rotary position frequencies (not in the paper)
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)  # slower, for longer rows than those trained on
    norm_eps: float = 1e-5  # epsilon of RMSNorm (not in the paper)
    init_std: float = 0.02  # standard deviation of every weight at the start (Appendix I)
    init_truncate: float = 0.0  # redraw weights beyond this many standard deviations; 0: keep all (not in the paper)
    init_residual: bool = False  # divide the std of wo and w2 by sqrt(2 layers), as GPT-2 does (not in the paper)
    biases: list[str] = field(default_factory=list)  # which layers have them: of qkv, wo (attention's output) and ffn
    tied: bool = True  # the embedding is the output matrix too; false: the output has its own
    qk_norm: bool = False  # RMSNorm of each head's queries and keys, against growing attention logits
    z_loss: float = 0.0  # in training: weight of the squared log-partition of the vocabulary softmax; 1e-4 is common
    attention: str = "auto"  # within documents: sdpa, flex, varlen or xformers; auto: flex on a GPU, sdpa on a CPU

    def __post_init__(self) -> None:
        checks = {
            "dim": (self.dim >= 1, "at least 1"),
            "n_layers": (self.n_layers >= 1, "at least one block"),
            "n_heads": (self.n_heads >= 1, "at least 1"),
            "n_kv_heads": (
                self.n_kv_heads == -1 or (self.n_kv_heads >= 1 and self.n_heads % self.n_kv_heads == 0),
                f"a divisor of n_heads={self.n_heads}, or -1",
            ),
            "head_dim": (
                self.head_dim == -1 or (self.head_dim >= 2 and self.head_dim % 2 == 0),
                "an even number (rotary positions turn pairs of channels), or -1 for dim / n_heads",
            ),
            "biases": (set(self.biases) <= set(BIASES), f"of {', '.join(BIASES)}"),
            "ffn_dim": (self.ffn_dim == -1 or self.ffn_dim >= 1, "at least 1, or -1 for the paper's"),
            "vocab_size": (self.vocab_size == -1 or self.vocab_size >= 1, "at least 1, or -1 for the tokenizer's"),
            "rope_theta": (0.0 < self.rope_theta < math.inf, "a finite number above 0"),
            "norm_eps": (0.0 < self.norm_eps < math.inf, "a finite number above 0"),
            "init_std": (0.0 <= self.init_std < math.inf, "a finite number, 0 or more"),
            "z_loss": (0.0 <= self.z_loss < math.inf, "a finite number, 0 (off) or more"),
            "init_truncate": (0.0 <= self.init_truncate < math.inf, "a finite number, 0 (keep all) or more"),
        }
        check_fields("model", self, checks)
        if self.attention not in BACKENDS:
            raise UserError(f"model.attention={self.attention}: expected one of {', '.join(BACKENDS)}")
        if self.head_dim == -1:
            check_heads("model", self.dim, self.n_heads)

    @classmethod
    def of(cls, model: dict[str, Any]) -> TransformerArgs:
        """The encoder's shape in the ``model`` section of a config, which may know other keys, or fewer."""
        known = {name: value for name, value in model.items() if name in cls.__dataclass_fields__}
        return cls(**known | {"rope_scaling": RopeScaling(**model.get("rope_scaling", {}))})

    @property
    def head_size(self) -> int:
        """Channels of a head."""
        return self.dim // self.n_heads if self.head_dim == -1 else self.head_dim

    @property
    def attention_width(self) -> int:
        """Channels of all heads together."""
        return self.n_heads * self.head_size

    def head_sizes(self) -> list[int]:
        """Of all attention layers."""
        return [self.head_size]


def check_heads(name: str, dim: int, n_heads: int) -> None:
    """Raise UserError unless ``dim`` splits into ``n_heads`` heads of an even size."""
    if dim % n_heads:
        raise UserError(f"{name}.dim={dim} does not split into {name}.n_heads={n_heads} equal heads")
    if dim // n_heads % 2:
        raise UserError(
            f"{name}.dim={dim} with {name}.n_heads={n_heads} gives heads of {dim // n_heads}: rotary positions "
            "turn pairs of channels, so the head size must be even"
        )


def ffn_width(dim: int) -> int:
    """Width of the SwiGLU layer: 8/3 of ``dim`` rounded up to a multiple of 256 (Tables 10 and 11)."""
    return 256 * -(-int(8 * dim / 3) // 256)


class RMSNorm(nn.RMSNorm):
    """Root-mean-square norm in the precision of its input: a gathered weight may be bf16, the residual stream fp32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class QKNorm(nn.Module):
    """RMSNorm of queries and keys, head by head, with a weight for each channel of a head (as Qwen3)."""

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.query, self.key = RMSNorm(head_dim, eps=eps), RMSNorm(head_dim, eps=eps)

    def forward(self, q_BSHK: Tensor, k_BTHK: Tensor) -> tuple[Tensor, Tensor]:
        return self.query(q_BSHK), self.key(k_BTHK)


class SelfAttention(nn.Module):
    """Multi-head self-attention with rotary positions; q, k and v come out of one product.

    Args:
        n_kv_heads: heads of keys and values, fewer than ``n_heads`` or None.
        head_dim: None: ``dim / n_heads``.
        biases: of ``qkv`` and ``wo``, those that have one.
    """

    def __init__(
        self,
        dim: int,
        n_heads: int,
        qk_norm_eps: float | None = None,
        n_kv_heads: int | None = None,
        head_dim: int | None = None,
        biases: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = n_heads, n_kv_heads or n_heads
        self.head_dim = head_dim or dim // n_heads
        self.wqkv = nn.Linear(dim, (n_heads + 2 * self.n_kv_heads) * self.head_dim, bias="qkv" in biases)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias="wo" in biases)
        self.qk_norm = None if qk_norm_eps is None else QKNorm(self.head_dim, qk_norm_eps)

    def forward(self, x_BSD: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        B, S, _ = x_BSD.shape
        n_q, n_kv = self.n_heads, self.n_kv_heads
        qk, v = self.wqkv(x_BSD).view(B, S, n_q + 2 * n_kv, self.head_dim).split((n_q + n_kv, n_kv), dim=2)
        if self.qk_norm is not None:
            qk = torch.cat(self.qk_norm(*qk.split((n_q, n_kv), dim=2)), dim=2)
        q, k = apply_rotary(qk, *rotary).split((n_q, n_kv), dim=2)
        if n_kv != n_q:  # every backend knows heads of equal number
            k, v = (x.repeat_interleave(n_q // n_kv, dim=2) for x in (k, v))
        out = attention(q, k, v, mask)
        return self.wo(out.reshape(B, S, -1))


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another, each with its own rotary positions.

    Keys and values map the encoder's width to the predictor's, which may differ (Table 4).
    """

    def __init__(self, dim: int, n_heads: int, source_dim: int, qk_norm_eps: float | None = None) -> None:
        super().__init__()
        self.n_heads, self.head_dim = n_heads, dim // n_heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(source_dim, 2 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.qk_norm = None if qk_norm_eps is None else QKNorm(self.head_dim, qk_norm_eps)

    def forward(
        self,
        x_BSD: Tensor,
        source_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        source_rotary: tuple[Tensor, Tensor],
        mask: Mask | None = None,
    ) -> Tensor:
        B, S, _ = x_BSD.shape
        q = self.wq(x_BSD).view(B, S, self.n_heads, self.head_dim)
        k, v = self.wkv(source_BTD).view(B, -1, 2, self.n_heads, self.head_dim).unbind(2)
        if self.qk_norm is not None:
            q, k = self.qk_norm(q, k)
        out = attention(apply_rotary(q, *rotary), apply_rotary(k, *source_rotary), v, mask)
        return self.wo(out.reshape(B, S, -1))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(gate) * up)`` with gate and up from one product."""

    def __init__(self, dim: int, width: int = -1, bias: bool = False) -> None:
        super().__init__()
        width = ffn_width(dim) if width == -1 else width
        self.w13 = nn.Linear(dim, 2 * width, bias=bias)
        self.w2 = nn.Linear(width, dim, bias=bias)

    def forward(self, x_BSD: Tensor) -> Tensor:
        gate, up = self.w13(x_BSD).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * up)


class EncoderBlock(nn.Module):
    """Pre-norm self-attention and feed-forward."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(args.dim, eps=args.norm_eps)
        qk_norm_eps = args.norm_eps if args.qk_norm else None
        n_kv_heads = args.n_heads if args.n_kv_heads == -1 else args.n_kv_heads
        self.attention = SelfAttention(args.dim, args.n_heads, qk_norm_eps, n_kv_heads, args.head_size, args.biases)
        self.ffn_norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn = FeedForward(args.dim, args.ffn_dim, "ffn" in args.biases)

    def forward(self, x_BSD: Tensor, rotary: tuple[Tensor, Tensor], mask: Mask | None = None) -> Tensor:
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), rotary, mask)
        return x_BSD + self.ffn(self.ffn_norm(x_BSD))


class Encoder(nn.Module):
    """Token embedding, bidirectional blocks, final norm. The embedding is also the output matrix, if it is tied."""

    def __init__(self, args: TransformerArgs) -> None:
        super().__init__()
        self.args = args
        self.embedding = nn.Embedding(args.vocab_size, args.dim)
        self.layers = nn.ModuleList(EncoderBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, eps=args.norm_eps)
        # A vector a token, which the optimizer treats as it does the embedding's.
        self.output = None if args.tied else nn.Embedding(args.vocab_size, args.dim)

    @property
    def output_VD(self) -> Tensor:
        """The output matrix."""
        return (self.embedding if self.output is None else self.output).weight

    def states(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        base_VD: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yield the residual stream [B, S, D] before the first block and after each, without final norm."""
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        rotary = rotary_angles(positions, self.args.head_size, self.args.rope_theta, self.args.rope_scaling)
        x_BSD = self.embedding(tokens_BS)
        if base_VD is not None:
            x_BSD = x_BSD + F.embedding(tokens_BS, base_VD)
        yield x_BSD
        for layer in self.layers:
            x_BSD = layer(x_BSD, rotary, mask)
            yield x_BSD

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        mask: Mask | None = None,
        base_VD: Tensor | None = None,
    ) -> Tensor:
        """Final states, normed.

        Args:
            tokens_BS: int64 token ids.
            positions: [S] or [B, S] int64 positions in the row; None counts from 0. A CrossBERT's encoder
                sees some of a row's tokens only, and these keep the positions they have in the row.
            mask: see :func:`lingua.attention.attention`.
            base_VD: added to the embedding, which is then a difference to it.

        Returns:
            [B, S, D].
        """
        *_, x_BSD = self.states(tokens_BS, positions, mask, base_VD)
        return self.norm(x_BSD)

    def encode(
        self, tokens_BS: Tensor, lengths_B: Tensor, layers: Sequence[int] = (-1,), final_norm: bool = True
    ) -> list[Tensor]:
        """Hidden states of padded rows, from any layers in one pass.

        Args:
            tokens_BS: right-padded token ids; what stands in the padding does not matter.
            lengths_B: number of real tokens of each row, at least 1.
            layers: 0 is the embedding, i the state after block i; negative numbers count from the last.
            final_norm: apply the encoder's final norm to the state of every block (never to the embedding).

        Returns:
            one [B, S, D] a layer, in the order asked. States in the padding are finite and meaningless.

        Raises:
            UserError: a layer the encoder does not have.
        """
        count = self.args.n_layers + 1
        wanted = [layer + count if layer < 0 else layer for layer in layers]
        for layer, index in zip(layers, wanted, strict=True):
            if not 0 <= index < count:
                raise UserError(f"layer {layer}: the encoder has layers 0 (embedding) to {count - 1}")
        key_ok_BS = torch.arange(tokens_BS.shape[1], device=tokens_BS.device) < lengths_B[:, None]
        mask = None if bool(key_ok_BS.all()) else key_ok_BS[:, None, None, :]
        found: dict[int, Tensor] = {}
        for index, x_BSD in enumerate(self.states(tokens_BS, mask=mask)):
            if index in wanted:
                found[index] = self.norm(x_BSD) if final_norm and index else x_BSD
        return [found[index] for index in wanted]


@torch.no_grad()
def init_weights(model: nn.Module, args: TransformerArgs, seed: int) -> None:
    """Normal(0, ``init_std``) for matrices, embeddings and vectors; ones for norms, zeros for biases and mixes.

    A function of ``seed`` alone.

    Every parameter has its own generator, seeded by its name, so one model's weights do not depend on what
    else the model holds: BERT and CrossBERT start from the same encoder.
    """
    norms = {id(module.weight) for module in model.modules() if isinstance(module, RMSNorm)}
    mixes = {id(mix) for module in model.modules() if isinstance(module, nn.ParameterList) for mix in module}
    scale = {}
    if args.init_residual:
        for stack in (module for module in model.modules() if isinstance(module, nn.ModuleList)):
            outputs = [p for name, p in stack.named_parameters() if name.endswith(("wo.weight", "w2.weight"))]
            scale |= {id(parameter): (2 * len(stack)) ** -0.5 for parameter in outputs}
    for name, parameter in model.named_parameters():
        if id(parameter) in norms:
            parameter.fill_(1.0)
            continue
        if id(parameter) in mixes or name.endswith(".bias"):
            parameter.zero_()
            continue
        generator = torch.Generator().manual_seed(counter_hash(seed, text_hash(name)) & ((1 << 63) - 1))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        if args.init_truncate:
            nn.init.trunc_normal_(values, a=-args.init_truncate, b=args.init_truncate, generator=generator)
        else:
            values.normal_(generator=generator)
        values = values * args.init_std * scale.get(id(parameter), 1.0)
        if isinstance(parameter, DTensor):  # every rank cuts its own part out of the same values
            mesh, placements = parameter.device_mesh, parameter.placements
            values = distribute_tensor(values.to(parameter.device), mesh, placements, src_data_rank=None)
        parameter.copy_(values)
