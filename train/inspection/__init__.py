"""`lnssm-train inspect`: what is in a run, an export, or a folder of arrays; without JAX."""
