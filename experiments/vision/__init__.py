"""Training of image classifiers: `lnssm_jax.models.VisionModel` with DeiT's recipe.

- images.py: sets of labeled images, in folders or in a file of arrays
- augment.py: random changes of one image, with Pillow
- batches.py: batch n as a function of (data, seed, n); mixup, cutmix, erasing
- loop.py: the training loop

The settings are `experiments.vision.settings`.
"""
