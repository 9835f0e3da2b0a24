"""Devices and processes: launchers, device mesh, stop signals, compilation caches, doctor."""
