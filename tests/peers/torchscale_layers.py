"""Retention as its authors released it."""

import sys
from types import SimpleNamespace
from unittest import mock

# The file with the positions also builds whole models, for which it imports what is absent here.
_NOT_NEEDED = ("fairscale", "fairscale.nn", "timm", "timm.models", "timm.models.layers")
sys.modules |= {name: mock.MagicMock() for name in _NOT_NEEDED}

from torchscale.architecture.retnet import RetNetRelPos  # noqa: E402
from torchscale.component.multiscale_retention import MultiScaleRetention  # noqa: E402

from tests.peers.numbers import DIM, T  # noqa: E402


def cases():
  args = SimpleNamespace(
    decoder_embed_dim=DIM,
    decoder_retention_heads=2,
    # Published: 1e-6. Its rows of scores are divided by their sums, of which only this eps shows.
    layernorm_eps=1e-20,
    multiway=False,
    recurrent_chunk_size=T,
  )
  layer = MultiScaleRetention(args, DIM, 2 * DIM, 2)
  positions = RetNetRelPos(args)
  return {"retnet_torchscale": (layer, lambda module, x: module(x, positions(T)))}
