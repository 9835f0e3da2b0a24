"""The command line `lnssm-train`."""
