"""The scans of `lnssm_jax.ops`, described for the contract: one file each."""

from tests.ops.scans.base import Case, Check, Scan
from tests.ops.scans.wkv4 import WKV4

SCANS = {scan.function.__name__: scan for scan in (WKV4,)}

__all__ = ["SCANS", "Case", "Check", "Scan"]
