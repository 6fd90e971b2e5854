"""Shared fixtures: one thread per process (two busy OpenMP pools on two cores stall each other)."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
