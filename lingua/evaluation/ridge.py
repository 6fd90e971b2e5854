"""Ridge regression in closed form: one factorization for every penalty, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

CHUNK_ROWS = 8192  # in float64 at a time


class RidgePath:
    """Ridge regression for any penalty from one eigendecomposition, in float64.

    ``W = (X^T X + lambda I)^-1 X^T Y`` (the paper's eq. 3), equal to scikit-learn's ``Ridge(alpha=lambda)``
    with ``fit_intercept=intercept``, behind its ``StandardScaler`` if ``standardize``. Of ``X^T X`` and
    ``X X^T`` the smaller is decomposed.

    Args:
        x_ND: features, of any float type; they are read in chunks, so no float64 copy of all is made.
        y_NC: targets.
    """

    def __init__(self, x_ND: Tensor, y_NC: Tensor, intercept: bool = False, standardize: bool = False) -> None:
        n, d = x_ND.shape
        y_NC = y_NC.to(x_ND.device, torch.float64)
        self.shift_D: Tensor | None = None
        self.scale_D: Tensor | None = None
        self.offset_C = y_NC.mean(0) if intercept else y_NC.new_zeros(y_NC.shape[1])
        chunks = x_ND.split(CHUNK_ROWS)
        if intercept or standardize:
            self.shift_D = sum(chunk.double().sum(0) for chunk in chunks) / n
        if standardize:
            variance_D = sum((chunk.double() - self.shift_D).square().sum(0) for chunk in chunks) / n
            constant_D = x_ND.amax(0) == x_ND.amin(0)  # their computed deviation is rounding, not scale
            self.scale_D = variance_D.sqrt().masked_fill(constant_D, 1.0)
        y_NC = y_NC - self.offset_C
        if n >= d:  # R = D
            gram_DD, moment_DC = y_NC.new_zeros(d, d), y_NC.new_zeros(d, y_NC.shape[1])
            for chunk, targets in zip(chunks, y_NC.split(CHUNK_ROWS), strict=True):
                rows = self._scaled(chunk)
                gram_DD += _square(rows)
                moment_DC += rows.T @ targets
            eigenvalues_R, self._basis_DR = torch.linalg.eigh(gram_DD)
            self._target_RC = self._basis_DR.T @ moment_DC
        else:  # R = N: (X^T X + lambda)^-1 X^T = X^T (X X^T + lambda)^-1
            rows = self._scaled(x_ND)
            eigenvalues_R, vectors_NR = torch.linalg.eigh(rows @ rows.T)
            self._basis_DR = rows.T @ vectors_NR
            self._target_RC = vectors_NR.T @ y_NC
        self._eigenvalues_R = eigenvalues_R.clamp(min=0)  # rounding makes small ones negative

    def weights(self, penalty: float) -> Tensor:
        """``W`` [D, C] for shifted and scaled features; ``penalty`` is above 0."""
        return self._basis_DR @ (self._target_RC / (self._eigenvalues_R + penalty)[:, None])

    def predict(self, x_MD: Tensor, penalties: list[float]) -> Iterator[Tensor]:
        """Yield the prediction [M, C] of each penalty (above 0)."""
        x_MD = self._scaled(x_MD)
        for penalty in penalties:
            yield x_MD @ self.weights(penalty) + self.offset_C

    def _scaled(self, x_ND: Tensor) -> Tensor:
        x_ND = x_ND.double()
        x_ND = x_ND if self.shift_D is None else x_ND - self.shift_D
        return x_ND if self.scale_D is None else x_ND / self.scale_D


def _square(x_ND: Tensor) -> Tensor:
    """``X^T X``. On a CPU through NumPy, which knows that it is symmetric and takes half the time."""
    if x_ND.device.type != "cpu":
        return x_ND.T @ x_ND
    x = x_ND.numpy()
    return torch.from_numpy(np.asarray(x.T @ x))
