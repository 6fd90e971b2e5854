"""Launching runs on SLURM or on this machine: ``python -m lingua.stool``; see ``docs/slurm.md``.

Importing it is cheap (no PyTorch), because the launched job and ``status`` import it too.
"""

from lingua.stool.evaluation import launch_evaluation

__all__ = ["launch_evaluation"]
