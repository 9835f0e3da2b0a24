"""The papers' experiments: tasks, sweeps, protocols and results; `python -m experiments NAME`.

They run from a checkout and are not installed. `train` trains and scores any model, and imports
nothing from here; README.md has the tasks and what data they read.

- data with known answers: mqar.py, listops.py, pixels.py; mqar_training.py trains on their rows,
  recall_sweep.py in sweeps
- scores of a model: choices.py, babilong.py, babilong_samples.py, needles.py, recall.py, rouge.py,
  by answers.py of prompts from samples.py
- long_context.py and sparse_training.py train and score small models of several mixers
- vision/: image classifiers; configs/, sweeps/: settings; results/, claims.md: what was found
"""
