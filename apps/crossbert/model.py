"""CrossBERT: a deep encoder of the visible tokens and a shallow cross-attention predictor of the hidden ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from lingua.attention import document_mask
from lingua.flops import ForwardFlops, block_flops, matrix_parameters, product_flops, stack_flops
from lingua.loss import LossSum, cross_entropy
from lingua.masking import View, documents, hidden_count, target_weights
from lingua.predictor import Predictor, PredictorArgs
from lingua.transformer import Encoder, TransformerArgs, init_weights


@dataclass
class CrossBertArgs(TransformerArgs):
    """Shape of encoder and predictor."""

    predictor: PredictorArgs = field(default_factory=PredictorArgs)

    def head_sizes(self) -> list[int]:
        """Of all attention layers, the predictor's too."""
        dim = self.dim if self.predictor.dim == -1 else self.predictor.dim
        n_heads = self.n_heads if self.predictor.n_heads == -1 else self.predictor.n_heads
        return [*super().head_sizes(), dim // n_heads]


class CrossBert(nn.Module):
    """Encoder, predictor, and the embedding (or an output matrix of its own) to predict tokens with.

    Args:
        args: shape, with ``vocab_size`` set.
        special_ids: token ids that are never prediction targets.
        seed: of the initial weights; the encoder starts as BERT's does.
        document_start: token id that opens a document, to keep attention within documents; None: whole rows.
    """

    def __init__(
        self, args: CrossBertArgs, special_ids: tuple[int, ...] = (), seed: int = 0, document_start: int | None = None
    ) -> None:
        super().__init__()
        self.args, self.special_ids, self.seed, self.document_start = args, special_ids, seed, document_start
        self.encoder = Encoder(args)
        self.predictor = Predictor(args.predictor, args)
        if not self.encoder.embedding.weight.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """Fill the weights, also those of a model that was on the meta device, and sharded, before."""
        init_weights(self, self.args, self.seed)

    def forward(self, tokens_BS: Tensor, view: View, weight_B: Tensor | None = None) -> LossSum:
        """Summed cross-entropy of the hidden tokens; the encoder never sees them.

        Args:
            tokens_BS: the whole rows.
            view: of these rows, or several stacked views of them (then its batch is a multiple of B).
            weight_B: 0.0 for rows that only pad the batch.
        """
        n_views = len(view.visible_BT) // len(tokens_BS)
        tokens_BS = tokens_BS.repeat(n_views, 1)
        weight_B = None if weight_B is None else weight_B.repeat(n_views)
        encoder_mask = predictor_mask = self_mask = None
        if self.document_start is not None:
            documents_BS = documents(tokens_BS, self.document_start)
            visible_documents_BT = documents_BS.gather(1, view.visible_BT)
            hidden_documents_BM = documents_BS.gather(1, view.hidden_BM)
            encoder_mask = document_mask(self.args.attention, visible_documents_BT, visible_documents_BT)
            predictor_mask = document_mask(self.args.attention, hidden_documents_BM, visible_documents_BT)
            if self.args.predictor.self_attention:
                self_mask = document_mask(self.args.attention, hidden_documents_BM, hidden_documents_BM)
        visible_tokens_BT = tokens_BS.gather(1, view.visible_BT)
        visible_BTD = self.predictor.read(self.encoder, visible_tokens_BT, view.visible_BT, encoder_mask)
        x_BMD = self.predictor(visible_BTD, view.visible_BT, view.hidden_BM, predictor_mask, self_mask)
        targets_BM = tokens_BS.gather(1, view.hidden_BM)
        weights_BM = target_weights(targets_BM, self.special_ids, weight_B)
        return cross_entropy(
            x_BMD.flatten(0, 1),
            self.encoder.output_VD,
            targets_BM.flatten(),
            weights_BM.flatten(),
            self.args.z_loss if self.training else 0.0,
        )

    def flops_per_token(
        self, seq_len: int, hidden_ratio: float, complementary: bool, predicted_share: float = 1.0
    ) -> float:
        """The paper's F for training, per view token.

        A view token costs the encoder or the predictor. A single view at ratio r pays ``F_enc (1 - r) + F_pred r``
        (eq. 8); with complementary masks the two views have ratios r and 1 - r, so F is their mean, whatever r. The
        predictor costs nothing at hidden positions that it does not predict.
        """
        ratio = 0.5 if complementary else hidden_ratio
        encoder = block_flops(self.encoder.layers, self.args.attention_width, seq_len)
        width, args = len(self.predictor.mask_vector), self.args.predictor
        predictor = block_flops(self.predictor.layers, width, seq_len)
        if args.self_attention:
            predictor += 12 * width * args.n_layers * seq_len
        return encoder * (1 - ratio) + predictor * ratio * predicted_share

    def row_flops(
        self, seq_len: int, hidden_ratio: float, complementary: bool, predicted_share: float = 1.0
    ) -> ForwardFlops:
        """What the forward pass of one row, all its views, costs the hardware.

        The encoder runs on the visible positions, the predictor and the logits on those of the hidden ones that are
        predicted. A mix of layers is not counted.
        """
        hidden = hidden_count(seq_len, hidden_ratio)
        width, args = len(self.predictor.mask_vector), self.args.predictor
        total = ForwardFlops()
        for masked in (hidden, seq_len - hidden) if complementary else (hidden,):
            visible = seq_len - masked
            total += stack_flops(self.encoder.layers, self.args.attention_width, visible)
            predicted = max(1, round(masked * predicted_share))
            total += stack_flops(self.predictor.layers, width, predicted, keys=visible)
            if args.self_attention:
                total += ForwardFlops(attention=4 * width * args.n_layers * predicted**2)
            total += product_flops(self.encoder.output_VD.shape, predicted)
            if isinstance(self.predictor.out, nn.Linear):
                total += product_flops(self.predictor.out.weight.shape, predicted)
        return total

    def parameter_counts(self) -> dict[str, int]:
        """Weights in matrices.

        ``full``: encoder, predictor and embedding; ``per_token``: half of that, the average that touches a token
        at ratio 0.5 (what Table 11 prints); ``encoder``: what is kept after training, with the
        embedding, and the output matrix if that is another.
        """
        full = matrix_parameters(self)
        return {"full": full, "per_token": full // 2, "encoder": matrix_parameters(self.encoder)}
