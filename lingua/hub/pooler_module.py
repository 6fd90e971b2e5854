"""A pooler of cross-attention blocks for sentence-transformers: learned queries read a text's tokens into one vector.

This file needs PyTorch and sentence-transformers only. An exported model brings a copy of it, because the library has
no such module: loading the model runs this code, which is what ``trust_remote_code=True`` allows.
"""

import os
import shutil

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from sentence_transformers.base.modules import Module
from torch import nn


class Block(nn.Module):
    """Pre-norm cross-attention from the queries to the tokens, and SwiGLU."""

    def __init__(self, dim: int, source_dim: int, n_heads: int, ffn_dim: int, norm_eps: float, qk_norm: bool) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim, eps=norm_eps), nn.RMSNorm(dim, eps=norm_eps)
        self.wq, self.wo = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.wkv = nn.Linear(source_dim, 2 * dim, bias=False)
        self.w13, self.w2 = nn.Linear(dim, 2 * ffn_dim, bias=False), nn.Linear(ffn_dim, dim, bias=False)
        head_dim = dim // n_heads
        self.query_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()
        self.key_norm = nn.RMSNorm(head_dim, eps=norm_eps) if qk_norm else nn.Identity()

    def forward(self, x_BQD, source_BTD, rotary, source_rotary, mask_B11T):
        q_BHQK = self.query_norm(self._heads(self.wq(self.attention_norm(x_BQD))))
        k_BHTK, v_BHTK = (self._heads(part) for part in self.wkv(source_BTD).chunk(2, dim=-1))
        q_BHQK, k_BHTK = rotate(q_BHQK, rotary), rotate(self.key_norm(k_BHTK), source_rotary)
        found_BHQK = F.scaled_dot_product_attention(q_BHQK, k_BHTK, v_BHTK, attn_mask=mask_B11T)
        x_BQD = x_BQD + self.wo(found_BHQK.transpose(1, 2).flatten(2))
        gate, up = self.w13(self.ffn_norm(x_BQD)).chunk(2, dim=-1)
        return x_BQD + self.w2(F.silu(gate) * up)

    def _heads(self, x_BSD):
        return x_BSD.unflatten(-1, (self.n_heads, -1)).transpose(1, 2)


class CrossAttentionPooler(Module):
    """The mean of what the queries find is the text's vector."""

    config_keys = [
        "dim", "source_dim", "n_layers", "n_heads", "ffn_dim", "n_queries", "position", "rope_theta", "norm_eps",
        "qk_norm", "frequencies",
    ]  # fmt: skip

    def __init__(
        self,
        dim: int,
        source_dim: int,
        n_layers: int,
        n_heads: int,
        ffn_dim: int,
        n_queries: int,
        position: int,
        rope_theta: float,
        norm_eps: float,
        qk_norm: bool,
        frequencies: list[float] | None = None,
    ) -> None:
        """
        Args:
            dim, source_dim: width of the blocks and of the encoder, which is that of the vectors too.
            position: rotary position of the first query, where the text begins at 0.
            frequencies: radians a position of each pair of a head's channels; None: those of ``rope_theta``.
        """
        super().__init__()
        self.dim, self.source_dim, self.n_layers, self.n_heads = dim, source_dim, n_layers, n_heads
        self.ffn_dim = ffn_dim
        self.n_queries, self.position, self.rope_theta = n_queries, position, rope_theta
        self.norm_eps, self.qk_norm, self.frequencies = norm_eps, qk_norm, frequencies
        self.queries_QD = nn.Parameter(torch.zeros(n_queries, dim))
        self.layers = nn.ModuleList(
            Block(dim, source_dim, n_heads, ffn_dim, norm_eps, qk_norm) for _ in range(n_layers)
        )
        self.norm = nn.RMSNorm(dim, eps=norm_eps)
        self.out = nn.Identity() if dim == source_dim else nn.Linear(dim, source_dim, bias=False)

    def forward(self, features, **kwargs):
        """Adds ``sentence_embedding`` [B, D] to the features."""
        source_BTD, mask_BT = features["token_embeddings"], features["attention_mask"]
        positions_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)  # also where padding stands before the text
        positions_Q = self.position + torch.arange(self.n_queries, device=source_BTD.device)
        rotary, source_rotary = self._angles(positions_Q), self._angles(positions_BT[:, None])
        x_BQD = self.queries_QD.to(source_BTD.dtype).expand(len(source_BTD), -1, -1)
        for layer in self.layers:
            x_BQD = layer(x_BQD, source_BTD, rotary, source_rotary, mask_BT.bool()[:, None, None])
        features["sentence_embedding"] = self.out(self.norm(x_BQD)).mean(dim=1)
        return features

    def _angles(self, positions):
        """Cosine and sine of the rotary angles, [..., K] for positions [...]."""
        head_dim = self.dim // self.n_heads
        steps = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
        frequencies = self.rope_theta ** (-steps / head_dim)
        if self.frequencies is not None:
            frequencies = torch.tensor(self.frequencies, device=positions.device)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()

    def get_embedding_dimension(self) -> int:
        return self.source_dim

    get_sentence_embedding_dimension = get_embedding_dimension  # as the library called it before version 6

    def save(self, output_path: str, *args, safe_serialization: bool = True, **kwargs) -> None:
        self.save_config(output_path)
        save_file(self.state_dict(), os.path.join(output_path, "model.safetensors"))
        # The library copies this file into the module's folder, and looks for it in the model's.
        shutil.copy(__file__, os.path.dirname(os.path.abspath(output_path)))

    @classmethod
    def load(cls, model_name_or_path: str, subfolder: str = "", **kwargs):
        names = ("token", "cache_folder", "revision", "local_files_only")
        options = {name: kwargs[name] for name in names if name in kwargs}
        module = cls(**cls.load_config(model_name_or_path, subfolder=subfolder, **options))
        return cls.load_torch_weights(model_name_or_path, subfolder=subfolder, model=module, **options)


def rotate(x_BHSK, rotary):
    """Rotate each pair of channels (k, k + K/2) by its angle."""
    cos, sin = (part.to(x_BHSK.dtype) for part in rotary)
    first, second = x_BHSK.chunk(2, dim=-1)
    return x_BHSK * cos + torch.cat((-second, first), dim=-1) * sin
