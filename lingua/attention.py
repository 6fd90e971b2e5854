"""Attention: one function, whatever computes it.

Dense attention and plain masks go to PyTorch's scaled dot product (SDPA). Attention within documents has a choice of
backends (``model.attention``), which need to know the documents once a batch (:func:`document_mask`), not once a layer:

- ``sdpa``: a boolean mask of all pairs. Runs anywhere, and is what the others are compared with.
- ``flex``: FlexAttention, which skips blocks of pairs without a common document. ``auto`` takes it on a GPU.
- ``varlen``: PyTorch's FlashAttention on the documents one after another.
- ``xformers``: the same from xFormers.

The last two wait for the device once a batch: the host has to know how many documents there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lingua.errors import UserError
from lingua.masking import same_document

BACKENDS = ("auto", "sdpa", "flex", "varlen", "xformers")


@dataclass
class DocumentMask:
    """Keeps each query to the keys of its own document, in the form that a backend reads.

    ``layout`` is a ``BlockMask`` (flex), :class:`Starts` (varlen) or a ``BlockDiagonalMask`` (xformers);
    ``blind_BS`` marks queries without a key where the backend does not give them zeros by itself.
    """

    backend: str
    queries_BS: Tensor
    keys_BT: Tensor
    layout: Any
    blind_BS: Tensor | None = None
    causal: bool = False  # and to the keys up to its own position

    def dense(self) -> Tensor:
        """The same as a boolean mask [B, 1, S, T]."""
        mask_B1ST = same_document(self.queries_BS, self.keys_BT)
        return mask_B1ST.tril() if self.causal else mask_B1ST


@dataclass
class Starts:
    """Where each document begins among all queries and among all keys of a batch, int32 [N + 1] each."""

    queries: Tensor
    keys: Tensor


CAUSAL = "causal"  # the mask that lets each query see the keys up to its own position
Mask = Tensor | DocumentMask | Literal["causal"]


def dense_mask(mask: Mask | None, S: int, T: int, device: torch.device) -> Tensor | None:
    """Any mask as a boolean tensor that broadcasts to [B, H, S, T]."""
    if isinstance(mask, str):
        return torch.ones(1, 1, S, T, dtype=torch.bool, device=device).tril()
    return mask.dense() if isinstance(mask, DocumentMask) else mask


def attention(q_BSHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: Mask | None = None) -> Tensor:
    """Scaled dot-product attention.

    Args:
        q_BSHK: queries: batch, query positions, heads, head size.
        k_BTHK, v_BTHK: keys and values at T positions.
        mask: None lets every query see every key, which is the fast path; a boolean [B, 1, S, T] is True where a
            query may look; or what :func:`document_mask` made; or :data:`CAUSAL`. A query that may look nowhere gets
            zeros.

    Returns:
        [B, S, H, K], in the dtype of the inputs.
    """
    if isinstance(mask, DocumentMask):
        out_BSHK = KERNELS[mask.backend](q_BSHK, k_BTHK, v_BTHK, mask)
        return out_BSHK if mask.blind_BS is None else out_BSHK.masked_fill(mask.blind_BS[:, :, None, None], 0.0)
    q_BHSK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q_BSHK, k_BTHK, v_BTHK))
    is_causal = isinstance(mask, str)
    if q_BSHK.dtype == torch.bfloat16 and q_BSHK.device.type == "cpu" and (mask is None or is_causal):
        # PyTorch's fused kernel does not use the CPU's bf16 products: plain ones take 0.15 to 0.7 of its time.
        scores_BHST = (q_BHSK * q_BSHK.shape[-1] ** -0.5) @ k_BHTK.transpose(2, 3)
        if is_causal:
            scores_BHST = scores_BHST.masked_fill(~dense_mask(mask, *scores_BHST.shape[2:], q_BSHK.device), -torch.inf)
        out_BHSK = scores_BHST.softmax(dim=-1) @ v_BHTK
    elif mask is None or is_causal:
        out_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHTK, v_BHTK, is_causal=is_causal)
    else:
        blind_B1S1 = ~mask.any(dim=-1, keepdim=True)  # a softmax over nothing would be NaN
        out_BHSK = F.scaled_dot_product_attention(q_BHSK, k_BHTK, v_BHTK, attn_mask=mask | blind_B1S1)
        out_BHSK = out_BHSK.masked_fill(blind_B1S1, 0.0)
    return out_BHSK.transpose(1, 2)


def document_mask(backend: str, queries_BS: Tensor, keys_BT: Tensor, causal: bool = False) -> Mask:
    """What keeps attention within documents, for :func:`attention`.

    Args:
        backend: one of :data:`BACKENDS` that :func:`check_attention` has nothing against.
        queries_BS, keys_BT: number of the document that each query and each key belongs to, ascending in each row
            (:func:`lingua.masking.documents`, and what is gathered from it at ascending positions).
        causal: also keep each query to the keys up to its own position; queries and keys are then the same tokens, and
            the backend is ``auto``, ``sdpa`` or ``flex``.
    """
    if backend == "auto":
        backend = "flex" if queries_BS.is_cuda else "sdpa"
    if backend == "sdpa":
        return DocumentMask(backend, queries_BS, keys_BT, None, None, causal).dense()
    if backend == "flex":

        def may_look(b: Tensor, h: Tensor, s: Tensor, t: Tensor) -> Tensor:
            same = queries_BS[b, s] == keys_BT[b, t]
            return same & (t <= s) if causal else same

        (B, S), T = queries_BS.shape, keys_BT.shape[1]
        layout = create_block_mask(may_look, B, None, S, T, queries_BS.device.type)
        return DocumentMask(backend, queries_BS, keys_BT, layout, None, causal)
    starts, blind_BS = pack(queries_BS, keys_BT)
    if backend == "varlen":
        return DocumentMask(backend, queries_BS, keys_BT, round_up(starts), blind_BS)
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask

    lengths = torch.stack((starts.queries, starts.keys)).diff().tolist()
    layout = BlockDiagonalMask.from_seqlens(*lengths, device=queries_BS.device)
    return DocumentMask(backend, queries_BS, keys_BT, layout, blind_BS)


def pack(queries_BS: Tensor, keys_BT: Tensor) -> tuple[Starts, Tensor | None]:
    """The documents of all rows, one after another; every one has a key.

    Returns:
        where they begin, and the blind queries [B, S], whose document has no key and which are counted to the document
        before or after (None where queries and keys are the same tensor).
    """
    queries, keys = (
        (documents + (torch.arange(len(documents), device=documents.device)[:, None] << 32)).flatten()
        for documents in (queries_BS, keys_BT)
    )
    found, of_key = keys.unique_consecutive(return_inverse=True)  # waits for the device
    of_query = (torch.searchsorted(found, queries, right=True) - 1).clamp(min=0)
    numbers = torch.arange(len(found) + 1, device=keys.device)
    starts = Starts(torch.searchsorted(of_query, numbers).int(), torch.searchsorted(of_key, numbers).int())
    return starts, None if queries_BS is keys_BT else (found[of_query] != queries).view_as(queries_BS)


def round_up(starts: Starts) -> Starts:
    """The same with empty documents at the end, up to a power of two, so that compiled code meets few shapes."""
    count = len(starts.keys) - 1
    index = torch.arange((1 << (count - 1).bit_length()) + 1, device=starts.keys.device).clamp(max=count)
    return Starts(starts.queries[index], starts.keys[index])


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)  # as it is, it computes every pair


def _flex(q_BSHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: DocumentMask) -> Tensor:
    is_plain = torch.compiler.is_compiling() or not q_BSHK.is_cuda
    kernel = flex_attention if is_plain else _compiled_flex()
    out_BHSK = kernel(*(x.transpose(1, 2) for x in (q_BSHK, k_BTHK, v_BTHK)), block_mask=mask.layout)
    return out_BHSK.transpose(1, 2)


def _varlen(q_BSHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: DocumentMask) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    starts = mask.layout
    q, k, v = (x.flatten(0, 1) for x in (q_BSHK, k_BTHK, v_BTHK))
    # No document is longer than a row.
    out = varlen_attn(q, k, v, starts.queries, starts.keys, q_BSHK.shape[1], k_BTHK.shape[1])
    return out.view_as(q_BSHK)


def _xformers(q_BSHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, mask: DocumentMask) -> Tensor:
    from xformers.ops import memory_efficient_attention

    q, k, v = (x.flatten(0, 1)[None] for x in (q_BSHK, k_BTHK, v_BTHK))
    return memory_efficient_attention(q, k, v, attn_bias=mask.layout).view_as(q_BSHK)


KERNELS = {"flex": _flex, "varlen": _varlen, "xformers": _xformers}


def check_attention(
    backend: str, isolated: bool, head_sizes: Sequence[int], device: torch.device, dtype: torch.dtype, compile: bool
) -> None:
    """Raise UserError unless this machine can train with ``model.attention=backend``.

    Args:
        isolated: whether attention stays within documents; only then is there a choice.
        head_sizes: of all attention layers.
        dtype: of the computation.
        compile: whether blocks are compiled.
    """
    if backend == "sdpa" or (backend == "auto" and not (isolated and device.type == "cuda")):
        return
    asked = f"model.attention={backend}"
    if not isolated:
        raise UserError(
            f"{asked} is about attention within documents, and data.isolate_documents is false: whole rows always go "
            "through SDPA. Use model.attention=auto, or data.isolate_documents=true"
        )
    reason = _obstacle("flex" if backend == "auto" else backend, head_sizes, device, dtype, compile)
    if reason is not None:
        other = "auto or sdpa" if device.type != "cuda" else "sdpa" if backend in ("auto", "flex") else "flex or sdpa"
        raise UserError(f"{asked} cannot run here: {reason}. Use model.attention={other} instead")


def _obstacle(
    backend: str, head_sizes: Sequence[int], device: torch.device, dtype: torch.dtype, compile: bool
) -> str | None:
    name = str(dtype).removeprefix("torch.")
    if backend == "xformers":
        try:
            from xformers.ops import memory_efficient_attention  # noqa: F401
        except ImportError as error:
            return f"xFormers is not there ({error}); pip install -r requirements-xformers.txt"
        if compile:
            return (
                "xFormers takes the lengths of documents as Python numbers, so compile=true would never stop compiling"
            )
    if device.type != "cuda":
        has = {"flex": "FlexAttention has no backward pass", "varlen": "varlen_attn has no kernel"}
        return f"{has.get(backend, 'xFormers has no kernel')} for {device.type}"
    if dtype == torch.float64:
        return f"it does not compute in {name}"
    if backend == "flex" and min(head_sizes) < 16:
        return f"FlexAttention takes heads of 16 and more, the model has {min(head_sizes)}"
    if backend != "flex" and any(size % 8 or size > 256 for size in head_sizes):
        return f"it takes heads of a multiple of 8 up to 256, the model has {sorted(set(head_sizes))}"
    if backend == "varlen" and dtype != torch.bfloat16:
        return f"FlashAttention computes in bf16, the run in {name}"
    if backend == "varlen" and torch.cuda.get_device_capability(device) < (8, 0):
        return f"FlashAttention needs compute capability 8.0, {torch.cuda.get_device_name(device)} has less"
    return None
