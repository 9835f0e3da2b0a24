"""The configuration of a training run.

- schema.py: the settings, `Train` and its groups, with the rules between settings
- optimizer.py: those of an optimizer
- published.py: the model of a published or an exported folder
- loading.py: config files, and the JSON form stored with a run
- overrides.py: `--set a.b=value`
- checked.py: dataclasses whose constructors check field names and types
- changes.py: settings that a resumed run may change
- versions.py: package versions and git commit, stored with a run
"""

from train.config.checked import ConfigError
from train.config.loading import from_dict, load, load_config, to_dict
from train.config.optimizer import Optimizer
from train.config.overrides import apply_overrides
from train.config.published import exported_model, published_model
from train.config.schema import Data, Mesh, Model, Preference, Sample, Train

__all__ = [
  "ConfigError",
  "Data",
  "Mesh",
  "Model",
  "Optimizer",
  "Preference",
  "Sample",
  "Train",
  "apply_overrides",
  "exported_model",
  "from_dict",
  "load",
  "load_config",
  "published_model",
  "to_dict",
]
