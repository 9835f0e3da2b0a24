"""A text that was read, as a safetensors file: `lnssm_jax.generate.Prefix`, saved and loaded.

    prefix = generate.read(model, [long_prompt])
    save_prefix("prompt.safetensors", prefix)
    rows = generate.generate(model, [[], question], options, start=load_prefix(path, model))

It belongs to the parameters that read it. The file has no trace of them: keep it with its model.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from lnssm_jax.files.reading import DataError
from lnssm_jax.generate import Prefix
from lnssm_jax.models import LanguageModel
from lnssm_jax.pretrained import safetensors
from lnssm_jax.pretrained.exports import name_of


def save_prefix(path: str | Path, prefix: Prefix) -> None:
  """Writes a prefix; needs the package `safetensors`.

  Raises:
    OSError: it cannot be written; a file that was there is unchanged.
  """
  leaves = jax.tree_util.tree_leaves_with_path(prefix)
  safetensors.write(path, {name_of(keys): np.asarray(x) for keys, x in leaves})


def load_prefix(path: str | Path, model: LanguageModel) -> Prefix:
  """Reads a prefix of a model.

  Raises:
    DataError: the file is damaged or of another kind of model; the message names it.
  """
  try:
    tensors = safetensors.Tensors(path)
    rows = tensors.kind("logits")[1][0] if "logits" in tensors else 0
    like = jax.eval_shape(lambda: _empty(model, max(1, rows)))
    names = {name_of(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(like)}
    found = {name: tensors.kind(name) for name in tensors}
    wanted = {name: (str(leaf.dtype), leaf.shape) for name, leaf in names.items()}
    for name in sorted(found.keys() | wanted.keys()):
      if found.get(name) != wanted.get(name):
        raise DataError(
          f"{path} is of another model: {name} is {found.get(name)}, and should be "
          f"{wanted.get(name)}."
        )
    if (tensors["length"] < 0).any():
      raise DataError(f"{path} is damaged: it has a length of {tensors['length'].min()} tokens.")
    return jax.tree_util.tree_map_with_path(
      lambda keys, _: jnp.asarray(tensors[name_of(keys)]), like
    )
  except DataError:
    raise
  except (OSError, ValueError, IndexError) as error:
    raise DataError(f"{path} cannot be read ({error}).") from None


def _empty(model: LanguageModel, rows: int) -> Prefix:
  vocabulary = (rows, model.vocab_size)
  logits, seen = jnp.zeros(vocabulary, jnp.float32), jnp.zeros(vocabulary, bool)
  return Prefix(model.init_state(rows), logits, seen, jnp.zeros(rows, jnp.int32))
