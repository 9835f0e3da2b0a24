"""The training stack: `python -m train fit | evaluate | generate | tokenize --config FILE`.

It runs from a checkout of the repository and is not part of the installed package `lnssm_jax`.
"""
