"""Sweeps: many runs of one file, resumed, trained together where their programs agree, compared.

    from train.sweeps import grid

    SWEEP = grid(make, {"model": MODELS, "width": (64, 128)}, learning_rates=RATES, seeds=(0, 1))

`lnssm-train sweep FILE` trains what is not finished and writes tables and a plot
(`docs/sweeps.md`). Nothing here imports JAX before it is used.
"""

from train.sweeps.spec import Plot, Run, Task, grid

__all__ = ["Plot", "Run", "Task", "grid"]
