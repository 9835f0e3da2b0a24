"""The tiny run of the trainer's tests, and its config as a file."""

from tests.train.conftest import _key_of_these_tests, config_file, text_folder, tiny

__all__ = ["_key_of_these_tests", "config_file", "text_folder", "tiny"]
