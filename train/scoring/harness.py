"""Tasks of the package `lm_eval`, unchanged, on data that it finds on this machine."""

import importlib
import os
from collections.abc import Sequence

from lnssm_jax.pretrained.harness import lm_eval_model
from lnssm_jax.pretrained.loaded import LoadedModel
from train.scoring.report import Report


def run(
  loaded: LoadedModel,
  tasks: Sequence[str],
  *,
  include: str | None = None,
  fewshot: int | None = None,
  limit: int | None = None,
  batch: int = 8,
) -> Report:
  """Evaluates tasks by name; `include` is a folder with .yaml files of more tasks.

  Raises:
    ValueError: the package is not installed, or a task is not known to it.
  """
  model = lm_eval_model(loaded, batch=batch)
  manager = importlib.import_module("lm_eval.tasks").TaskManager(include_path=include)
  if missing := [name for name in tasks if name not in manager.all_tasks]:
    raise ValueError(
      f"tasks={missing} are not known to lm_eval; give the folder of their .yaml files with"
      " --include, or list those it has: lm_eval ls tasks"
    )
  # Standard errors by resampling would fork this process, whose threads of JAX a fork can block.
  os.environ.setdefault("DISABLE_MULTIPROC", "1")
  results = importlib.import_module("lm_eval").simple_evaluate(
    model, tasks=list(tasks), task_manager=manager, num_fewshot=fewshot, limit=limit
  )["results"]
  rows = []
  for name, metrics in results.items():
    for key, value in metrics.items():
      metric, separator, chosen = key.partition(",")
      if separator and not metric.endswith("_stderr"):
        error = metrics.get(f"{metric}_stderr,{chosen}")
        numbers = {"value": value, "stderr": error if isinstance(error, float) else None}
        rows.append({"task": name, "metric": metric, "filter": chosen} | numbers)
  settings = {"model": str(loaded.source), "step": loaded.step, "fewshot": fewshot, "limit": limit}
  return Report("lm-eval", settings, {"metrics": rows})
