"""ELECTRA: the encoder tells which tokens a small generator has replaced (Clark et al. 2020)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.bert.model import BertArgs, attention_mask
from lingua.attention import Mask
from lingua.distributed import all_sum
from lingua.errors import UserError, check_fields
from lingua.flops import ForwardFlops, block_flops, matrix_parameters, product_flops, stack_flops
from lingua.hashing import counter_hash
from lingua.loss import cross_entropy_and_samples
from lingua.masking import View, hidden_count, target_weights
from lingua.rotary import rotary_angles
from lingua.transformer import Encoder, EncoderBlock, RMSNorm, TransformerArgs, check_heads, init_weights


@dataclass
class RtdArgs:
    """ELECTRA's generator and loss. -1 takes the encoder's value."""

    n_layers: int = 3  # blocks of the generator (inferred: 258M parameters and 7.5e19 FLOPs of Table 3)
    dim: int = -1  # its width; another than the encoder's takes a projection on either side
    n_heads: int = -1  # its attention heads
    ffn_dim: int = -1  # width of its feed-forward layers; -1: as for the encoder, from its own width
    loss_weight: float = 50.0  # of the discriminator's mean loss beside the generator's (ELECTRA; not in the paper)
    # The encoder's embedding is the generator's, whose gradient it leaves alone, plus a difference that it learns
    # (gradient-disentangled embedding sharing, DeBERTaV3); else one embedding gets the gradients of both.
    disentangled: bool = False

    def __post_init__(self) -> None:
        checks = {
            "n_layers": (self.n_layers >= 1, "at least one block"),
            "dim": (self.dim == -1 or self.dim >= 1, "at least 1, or -1 for the encoder's"),
            "n_heads": (self.n_heads == -1 or self.n_heads >= 1, "at least 1, or -1 for the encoder's"),
            "ffn_dim": (self.ffn_dim == -1 or self.ffn_dim >= 1, "at least 1, or -1"),
            "loss_weight": (0.0 <= self.loss_weight < float("inf"), "a finite number, 0 or more"),
        }
        check_fields("rtd", self, checks)

    def generator(self, encoder: TransformerArgs) -> TransformerArgs:
        """Shape of the generator beside such an encoder. Raises UserError if its heads do not fit."""
        if not encoder.tied:
            raise UserError("model.tied=false goes without objective=rtd: the generator predicts through the embedding")
        dim = encoder.dim if self.dim == -1 else self.dim
        n_heads = encoder.n_heads if self.n_heads == -1 else self.n_heads
        same_heads = dim == encoder.dim and n_heads == encoder.n_heads
        n_kv_heads, head_dim = (encoder.n_kv_heads, encoder.head_dim) if same_heads else (-1, -1)
        if head_dim == -1:
            check_heads("rtd", dim, n_heads)
        ffn_dim = encoder.ffn_dim if self.ffn_dim == -1 and dim == encoder.dim else self.ffn_dim
        return dataclasses.replace(
            encoder, dim=dim, n_layers=self.n_layers, n_heads=n_heads, ffn_dim=ffn_dim,
            n_kv_heads=n_kv_heads, head_dim=head_dim,
        )  # fmt: skip


class RtdLoss(NamedTuple):
    """Sums of the two losses and their counts, all scalars that add up as those of :class:`lingua.loss.LossSum`.

    ``loss / targets`` is what is minimized: mean generator loss + weight x mean discriminator loss.
    """

    loss: Tensor
    targets: Tensor  # masked positions that the generator predicts
    generator: Tensor
    discriminator: Tensor
    positions: Tensor  # that the discriminator judges: all
    replaced: Tensor  # positions with another token than the original
    found: Tensor  # of these, those the discriminator calls replaced
    correct: Tensor  # positions it is right about

    def figures(self) -> dict[str, float]:
        """What is reported of it, by name."""
        return {
            "generator_loss": float(self.generator / self.targets),
            "discriminator_loss": float(self.discriminator / self.positions),
            "replaced_share": float(self.replaced / self.positions),
            "replaced_found": float(self.found / self.replaced.clamp(min=1)),
            "discriminator_accuracy": float(self.correct / self.positions),
        }


class Generator(nn.Module):
    """A few blocks that predict masked tokens through the shared embedding, or their own if it is disentangled."""

    def __init__(self, args: TransformerArgs, encoder: TransformerArgs, own_embedding: bool) -> None:
        super().__init__()
        self.args = args
        same = args.dim == encoder.dim
        self.embedding = nn.Embedding(encoder.vocab_size, encoder.dim) if own_embedding else None
        self.into = nn.Identity() if same else nn.Linear(encoder.dim, args.dim, bias=False)
        self.layers = nn.ModuleList(EncoderBlock(args) for _ in range(args.n_layers))
        self.norm = RMSNorm(args.dim, eps=args.norm_eps)
        self.out = nn.Identity() if same else nn.Linear(args.dim, encoder.dim, bias=False)

    def forward(self, inputs_BS: Tensor, embedding_VD: Tensor, hidden_BM: Tensor, mask: Mask | None) -> Tensor:
        """States [B, M, D] of the encoder's width at the masked positions, ready for the output matrix."""
        positions = torch.arange(inputs_BS.shape[1], device=inputs_BS.device)
        rotary = rotary_angles(positions, self.args.head_size, self.args.rope_theta, self.args.rope_scaling)
        x_BSD = self.into(F.embedding(inputs_BS, embedding_VD))
        for layer in self.layers:
            x_BSD = layer(x_BSD, rotary, mask)
        x_BMD = x_BSD.gather(1, hidden_BM[..., None].expand(-1, -1, x_BSD.shape[-1]))
        return self.out(self.norm(x_BMD))


class Electra(nn.Module):
    """Generator and discriminator; the latter, ``encoder``, is what is kept.

    Args:
        args: shape of the encoder, with ``vocab_size`` set.
        rtd: of the generator, and the loss.
        special_ids: token ids that are never masked; the discriminator judges them too.
        seed: of the initial weights (the encoder starts as BERT's does) and of the generator's samples.
        document_start: token id that opens a document, to keep attention within documents; None: whole rows.
    """

    def __init__(
        self,
        args: BertArgs,
        rtd: RtdArgs,
        special_ids: tuple[int, ...] = (),
        seed: int = 0,
        document_start: int | None = None,
    ) -> None:
        super().__init__()
        self.args, self.rtd, self.special_ids = args, rtd, special_ids
        self.seed, self.document_start = seed, document_start
        self.generator = Generator(rtd.generator(args), args, rtd.disentangled)
        self.encoder = Encoder(args)
        self.head = nn.Parameter(torch.empty(args.dim))  # of the discriminator: one logit a position
        if not self.head.is_meta:
            self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Fill the weights, also those of a model that was on the meta device, and sharded, before."""
        init_weights(self, self.args, self.seed)
        if self.generator.embedding is not None:
            # The encoder's holds the difference to the generator's; together they start as a BERT's embedding.
            self.generator.embedding.weight.copy_(self.encoder.embedding.weight)
            self.encoder.embedding.weight.zero_()

    def forward(
        self,
        inputs_BS: Tensor,
        tokens_BS: Tensor,
        view: View,
        weight_B: Tensor,
        index_B: Tensor,
        share: Tensor | None = None,
    ) -> RtdLoss:
        """Both losses, summed over their positions.

        Args:
            inputs_BS, tokens_BS, view, weight_B: as for :class:`apps.bert.model.Bert`.
            index_B: global row indices; the samples are a function of these, the seed, the position, and the weights.
            share: targets of the generator over positions of the discriminator in the whole step, on all ranks, with
                which the quotient of the sums is a weighted sum of the two means; None: this batch is the step.
        """
        mask = attention_mask(self, tokens_BS)
        own, shared = self.generator.embedding, self.encoder.embedding.weight
        embedding_VD = shared if own is None else own.weight
        targets_BM = tokens_BS.gather(1, view.hidden_BM)
        weights_BM = target_weights(targets_BM, self.special_ids, weight_B)
        x_ND = self.generator(inputs_BS, embedding_VD, view.hidden_BM, mask).flatten(0, 1)
        z_loss = self.args.z_loss if self.training else 0.0
        # 24 bits of a hash, which fit a float32.
        uniform_BM = (counter_hash(self.seed, 3, index_B[:, None], view.hidden_BM) >> 40 & (1 << 24) - 1) / (1 << 24)
        of_hidden = (part_BM.flatten() for part_BM in (targets_BM, weights_BM, uniform_BM))
        (generator, targets), sampled_N = cross_entropy_and_samples(x_ND, embedding_VD, *of_hidden, z_loss)
        sampled_BM = sampled_N.view_as(targets_BM)

        is_special_BM = target_weights(targets_BM, self.special_ids) == 0
        corrupted_BS = tokens_BS.scatter(1, view.hidden_BM, torch.where(is_special_BM, targets_BM, sampled_BM))

        base_VD = None if own is None else own.weight.detach()
        states_BSD = self.encoder(corrupted_BS, mask=mask, base_VD=base_VD)
        logits_BS = (states_BSD * self.head).sum(dim=-1)
        logits_BS = logits_BS.to(torch.promote_types(logits_BS.dtype, torch.float32))
        replaced_BS = (corrupted_BS != tokens_BS).to(logits_BS.dtype)  # a sample that is the original is none
        losses_BS = F.binary_cross_entropy_with_logits(logits_BS, replaced_BS, reduction="none")
        weight_BS = weight_B[:, None].expand_as(losses_BS)
        discriminator, positions = (losses_BS * weight_BS).sum(), weight_BS.sum()
        called_BS = logits_BS > 0

        share = targets / positions if share is None else share
        return RtdLoss(
            loss=generator + self.rtd.loss_weight * share * discriminator,
            targets=targets,
            generator=generator,
            discriminator=discriminator,
            positions=positions,
            replaced=(replaced_BS * weight_BS).sum(),
            found=(replaced_BS * called_BS * weight_BS).sum(),
            correct=((replaced_BS == called_BS) * weight_BS).sum(),
        )

    def flops_per_token(self, seq_len: int) -> float:
        """The paper's F for training, per token: generator and discriminator both read the whole row."""
        generator = block_flops(self.generator.layers, self.generator.args.attention_width, seq_len)
        return block_flops(self.encoder.layers, self.args.attention_width, seq_len) + generator

    def row_flops(self, seq_len: int, hidden_ratio: float) -> ForwardFlops:
        """What the forward pass of one row costs the hardware."""
        hidden = hidden_count(seq_len, hidden_ratio)
        total = stack_flops(self.encoder.layers, self.args.attention_width, seq_len)
        total += stack_flops(self.generator.layers, self.generator.args.attention_width, seq_len)
        total += product_flops(self.encoder.embedding.weight.shape, hidden)
        if isinstance(self.generator.into, nn.Linear):
            total += product_flops(self.generator.into.weight.shape, seq_len)
            total += product_flops(self.generator.out.weight.shape, hidden)
        return total

    def parameter_counts(self) -> dict[str, int]:
        """Weights in matrices: ``full``, used ``per_token`` (all), and of the ``encoder`` that is kept."""
        full = matrix_parameters(self)
        return {"full": full, "per_token": full, "encoder": matrix_parameters(self.encoder)}


def step_share(batches: list[tuple[Tensor, Tensor, View, Tensor]], special_ids: tuple[int, ...]) -> Tensor:
    """What :class:`Electra` takes as ``share``: targets over positions of a step, all its micro-batches on all ranks.

    Args:
        batches: this rank's ``(inputs_BS, tokens_BS, view, weight_B)``.
    """
    counts = torch.zeros(2, dtype=torch.float64, device=batches[0][0].device)
    for _, tokens_BS, view, weight_B in batches:
        targets = target_weights(tokens_BS.gather(1, view.hidden_BM), special_ids, weight_B).sum()
        counts += torch.stack((targets, weight_B.sum() * tokens_BS.shape[1]))
    targets, positions = all_sum(counts)
    return targets / positions
