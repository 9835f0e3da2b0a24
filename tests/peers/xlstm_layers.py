"""The mLSTM block of xlstm's package, in its parallel form, which runs on a CPU as it is."""

import functools

from xlstm.blocks.mlstm.backends import parallel_stabilized_simple
from xlstm.blocks.mlstm.layer import mLSTMLayer, mLSTMLayerConfig

from tests.peers.numbers import DIM, inputs


def cases():
  length = inputs("xlstm_block").shape[1]
  sizes = {"embedding_dim": DIM, "num_heads": 2, "context_length": length}
  layer = mLSTMLayer(mLSTMLayerConfig(**sizes, round_proj_up_to_multiple_of=1))
  # Their eps is in units of a maximum that differs from the recurrent form's.
  layer.mlstm_cell.backend_fn = functools.partial(parallel_stabilized_simple, eps=0.0)
  return {"xlstm_block": (layer, lambda module, x: module(x))}
