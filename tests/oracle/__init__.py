"""The oracle of changes that must not alter results: what was recorded before, and is compared.

    make records                                                       # compares all
    python -m tests.oracle compare losses mixers configs programs      # the same, in one process
    python -m tests.oracle compare programs --match linear_attention
    python -m tests.oracle compare --all     # also models and programs that are like others
    python -m tests.oracle record mixers --match gla                   # replaces these records

"losses" are those of the first 20 steps of `make train`, as hexadecimal floats. "mixers" are the
output of every mixer at a small size, two documents in a row and a step of decoding, and the
gradients of its input and of every parameter. "configs" are the logits, losses and norms of three
training steps of every model of `configs/` at a small size. "programs" are hashes of what the
benchmarks lower; no program runs, and no device is needed.

`records.json` says with what it was recorded. Bits of values depend on the jax version and on the
kind of CPU; with others the comparison has a relative bound, and says so. Programs depend on the
jax version, and the text that losses are of is the Python version's: others are skipped, with the
reason.
"""
