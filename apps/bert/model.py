"""BERT: masked language modelling, or next-token prediction, with the encoder's embedding (or output matrix)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from lingua.attention import CAUSAL, Mask, document_mask
from lingua.flops import ForwardFlops, block_flops, matrix_parameters, product_flops, stack_flops
from lingua.loss import LossSum, cross_entropy
from lingua.masking import View, documents, hidden_count, target_weights
from lingua.transformer import Encoder, TransformerArgs, init_weights


@dataclass
class BertArgs(TransformerArgs):
    """The encoder is the whole model."""


class Bert(nn.Module):
    """A flat encoder that predicts masked tokens, or each next one, through its embedding or output matrix.

    Args:
        args: shape, with ``vocab_size`` set.
        special_ids: token ids that are never prediction targets.
        seed: of the initial weights.
        document_start: token id that opens a document, to keep attention within documents; None: whole rows.
    """

    def __init__(
        self, args: BertArgs, special_ids: tuple[int, ...] = (), seed: int = 0, document_start: int | None = None
    ) -> None:
        super().__init__()
        self.args, self.special_ids, self.seed, self.document_start = args, special_ids, seed, document_start
        self.encoder = Encoder(args)
        if not self.encoder.embedding.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """Fill the weights, also those of a model that was on the meta device, and sharded, before."""
        init_weights(self, self.args, self.seed)

    def forward(
        self, inputs_BS: Tensor, tokens_BS: Tensor, view: View | None, weight_B: Tensor | None = None
    ) -> LossSum:
        """Summed cross-entropy at the masked positions, or of each next token.

        Args:
            inputs_BS: tokens with the mask token in place (:func:`lingua.masking.mask_tokens`).
            tokens_BS: the original tokens.
            view: ``hidden_BM`` are the masked positions; None: every position but the last predicts the next token
                from itself and those before it (CLM), and ``inputs_BS`` are the tokens themselves.
            weight_B: 0.0 for rows that only pad the batch.
        """
        x_BSD = self.encoder(inputs_BS, mask=attention_mask(self, tokens_BS, causal=view is None))
        if view is None:
            x_BMD, targets_BM = x_BSD[:, :-1], tokens_BS[:, 1:]
        else:
            x_BMD = x_BSD.gather(1, view.hidden_BM[..., None].expand(-1, -1, x_BSD.shape[-1]))
            targets_BM = tokens_BS.gather(1, view.hidden_BM)
        weights_BM = target_weights(targets_BM, self.special_ids, weight_B)
        return cross_entropy(
            x_BMD.flatten(0, 1),
            self.encoder.output_VD,
            targets_BM.flatten(),
            weights_BM.flatten(),
            self.args.z_loss if self.training else 0.0,
        )

    def flops_per_token(self, seq_len: int) -> float:
        """The paper's F for training, per token. Causal attention counts as any other."""
        return block_flops(self.encoder.layers, self.args.attention_width, seq_len)

    def row_flops(self, seq_len: int, hidden_ratio: float | None) -> ForwardFlops:
        """What the forward pass of one row costs the hardware, logits at the predicted positions included.

        Args:
            hidden_ratio: None if each next token is predicted. Causal attention is counted over all pairs.
        """
        predicted = seq_len - 1 if hidden_ratio is None else hidden_count(seq_len, hidden_ratio)
        blocks = stack_flops(self.encoder.layers, self.args.attention_width, seq_len)
        return blocks + product_flops(self.encoder.output_VD.shape, predicted)

    def parameter_counts(self) -> dict[str, int]:
        """Weights in matrices: ``full``, used ``per_token``, and of the ``encoder`` that is kept. All equal here."""
        count = matrix_parameters(self)
        return {"full": count, "per_token": count, "encoder": count}


def attention_mask(model: nn.Module, tokens_BS: Tensor, causal: bool = False) -> Mask | None:
    """What keeps self-attention of whole rows within documents, if the model wants that, and to the past."""
    if model.document_start is None:
        return CAUSAL if causal else None
    documents_BS = documents(tokens_BS, model.document_start)
    return document_mask(model.args.attention, documents_BS, documents_BS, causal)
