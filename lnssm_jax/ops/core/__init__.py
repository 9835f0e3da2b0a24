"""Shared by all ops: dispatch, argument checks, segments, precision, chunking, sharding."""
