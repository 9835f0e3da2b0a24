"""The settings of an optimizer."""

import dataclasses
from typing import Any, Literal

from train.config.checked import at_least, check, check_json, settings


@settings
class Optimizer:
  """An optimizer with a learning-rate schedule over the whole run.

  `name` is "adamw"; "muon", which takes the matrices inside the layers, with Adam for all other
  parameters; or "MODULE:FUNCTION" of a function that returns an optax transformation, such as
  "optax:scale_by_lion": it takes the place of Adam. `options` are its keyword arguments (for "muon"
  those of `optax.contrib.scale_by_muon`, and `consistent_rms`, the root mean square of an update,
  0.2 as Adam's). Clipping, weight decay and the learning rate are the same for all of them.

  After `warmup_steps` steps of linear warmup, over the remaining steps: "exponential" is
  lr = peak_lr (final_lr / peak_lr)^(step / steps), "cosine" half a cosine and "linear" a line from
  peak_lr to final_lr. "wsd" (warmup, stable, decay) is peak_lr, and a line to final_lr in the last
  `decay_steps` steps. "constant" is peak_lr, and "inverse_sqrt" peak_lr sqrt(warmup_steps / step):
  these two do not depend on `steps` and end where they end.

  `weight_decay` is decoupled and acts on matrices, not on the parameters of
  `lnssm_jax.sharding.WITHOUT_WEIGHT_DECAY`.

  `lr_factors` multiplies the learning rate of the parameters that match a pattern, such as
  {"embed.*": 0.1, "blocks.mixer.*": 0.0}: names as `lnssm-train inspect` prints them, the first
  pattern that matches counts, and 0 freezes. `ema_decay` is that of an average of the parameters,
  ema <- ema_decay * ema + (1 - ema_decay) * parameters after every step, which begins with the
  initial ones; `--ema` of `evaluate`, `generate` and `export` uses it.

  With `lora_rank` r (LoRA, Hu et al. 2021) only corrections of low rank to the matrices that match
  `lora_names` are trained: W = W_0 + lora_alpha / r * A B, where A begins with normal numbers of
  variance 1 / in, and B with zeros. All other parameters are frozen. The run's parameters are the
  sums W, so that checkpoints, evaluation and exports are those of any run; A, B and the moments, of
  A and B alone, are in the optimizer's state.

  Biases by which routers select experts (`balance_bias` of the channel mixer "moe") move by
  `router_bias_rate` per step, against the load of their expert (DeepSeek-V3, section 2.1.2).

  The gradient is that of the loss plus two penalties, means over predicted tokens with logits z:
  z_loss * logsumexp(z)^2 (PaLM; 1e-4 is usual), and logit_penalty / 2 * max(z)^2 (RWKV, LNSSM).
  """

  name: str = "adamw"  # or "muon", or MODULE:FUNCTION
  options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of that function
  peak_lr: float  # learning rate after the warmup
  final_lr: float  # at the last step
  # From peak_lr to final_lr.
  schedule: Literal["exponential", "cosine", "linear", "wsd", "constant", "inverse_sqrt"] = (
    "exponential"
  )
  warmup_steps: int = 0  # from 0 to peak_lr, a line
  decay_steps: int | None = None  # of "wsd"; None: a tenth of the steps after the warmup
  b1: float = 0.9  # decay of Adam's first moment
  b2: float = 0.99  # of its second moment
  eps: float = 1e-8  # added to the root of the second moment
  weight_decay: float = 0.0  # of matrices, times the learning rate
  clip_norm: float | None = None  # limit on the global gradient norm
  lr_factors: dict[str, float] = dataclasses.field(default_factory=dict)  # by name
  lora_rank: int | None = None  # of trained corrections to matrices; None trains all parameters
  lora_alpha: float | None = None  # times the corrections, over the rank; None: the rank
  lora_names: tuple[str, ...] = ("*_proj.kernel",)  # patterns of the matrices that get corrections
  router_bias_rate: float = 1e-3  # step of the biases that balance experts
  ema_decay: float | None = None  # of an average of the parameters
  z_loss: float = 0.0  # weight of logsumexp(logits)^2
  logit_penalty: float = 0.0  # weight of max(logits)^2 / 2

  def __post_init__(self):
    check(self.peak_lr > 0, f"optimizer.peak_lr={self.peak_lr} must be positive.")
    check(
      0 <= self.final_lr <= self.peak_lr,
      f"optimizer.final_lr={self.final_lr} must be between 0 and optimizer.peak_lr={self.peak_lr}.",
    )
    check(
      self.final_lr > 0 or self.schedule != "exponential",
      "optimizer.final_lr=0.0 cannot be reached by an exponential schedule; use a small positive"
      " value such as 1e-5, or optimizer.schedule='cosine'.",
    )
    at_least("optimizer.warmup_steps", self.warmup_steps, 0)
    check(
      self.warmup_steps > 0 or self.schedule != "inverse_sqrt",
      "optimizer.warmup_steps=0 has no inverse square root: optimizer.schedule='inverse_sqrt' is"
      " peak_lr at the end of the warmup; give warmup_steps of 1 or more, such as 4000.",
    )
    check(
      self.decay_steps is None or self.schedule == "wsd",
      f"optimizer.decay_steps={self.decay_steps} belongs to optimizer.schedule='wsd', and this"
      f" one is {self.schedule!r}; leave it out, or choose 'wsd'.",
    )
    if self.decay_steps is not None:
      at_least("optimizer.decay_steps", self.decay_steps, 1)
    for name in ("b1", "b2"):
      value = getattr(self, name)
      check(0 <= value < 1, f"optimizer.{name}={value} must be in [0, 1).")
    check(self.eps > 0, f"optimizer.eps={self.eps} must be positive.")
    for name in ("weight_decay", "router_bias_rate", "z_loss", "logit_penalty"):
      at_least(f"optimizer.{name}", getattr(self, name), 0)
    for pattern, factor in self.lr_factors.items():
      at_least(f"optimizer.lr_factors[{pattern!r}]", factor, 0)
    if self.lora_rank is None:
      check(
        self.lora_alpha is None,
        f"optimizer.lora_alpha={self.lora_alpha} belongs to LoRA; give optimizer.lora_rank, too.",
      )
    else:
      at_least("optimizer.lora_rank", self.lora_rank, 1)
      alpha = self.lora_alpha
      check(alpha is None or alpha > 0, f"optimizer.lora_alpha={alpha} must be positive.")
      check(
        self.name != "muon" and not self.lr_factors,
        f"optimizer.lora_rank={self.lora_rank} goes with neither optimizer.name='muon' nor"
        " optimizer.lr_factors: it trains corrections, and freezes all that optimizer.lora_names"
        " does not name.",
      )
    check(
      self.ema_decay is None or 0 < self.ema_decay < 1,
      f"optimizer.ema_decay={self.ema_decay} must be between 0 and 1, such as 0.999; None keeps no"
      " average.",
    )
    check(
      self.name in ("adamw", "muon") or self.name.count(":") == 1,
      f"optimizer.name={self.name!r} must be 'adamw', 'muon', or 'MODULE:FUNCTION' of a function"
      " that returns an optax transformation, such as 'optax:scale_by_lion'.",
    )
    check(
      self.name != "adamw" or not self.options,
      f"optimizer.options={self.options} belong to another optimizer; 'adamw' has b1, b2 and eps.",
    )
    check_json("optimizer.options", self.options)
    check(
      self.clip_norm is None or self.clip_norm > 0,
      f"optimizer.clip_norm={self.clip_norm} must be positive; None turns clipping off.",
    )
