"""Sets of images: folders, arrays, and what is wrong with them."""

import re

import numpy as np
import pytest
from PIL import Image

from experiments.vision.images import DataError, open_images


def test_folders_are_classes_in_alphabetical_order(tmp_path):
  for name, value in (("dog", 10), ("cat", 20), ("ant", 30)):
    (tmp_path / name / "deep").mkdir(parents=True)
    Image.new("RGB", (5, 4), (value, 0, 0)).save(tmp_path / name / "deep" / "a.png")
  (tmp_path / "cat" / "notes.txt").write_text("no image")
  images = open_images(str(tmp_path))
  assert images.classes == ["ant", "cat", "dog"]
  assert list(images.labels) == [0, 1, 2]
  assert [np.asarray(images.image(n))[0, 0, 0] for n in range(len(images))] == [30, 20, 10]


def test_arrays_are_read_by_name(file):
  images = open_images(f"{file}:test")
  with np.load(file) as arrays:
    np.testing.assert_array_equal(np.asarray(images.image(7)), arrays["test_x"][7])
    np.testing.assert_array_equal(images.labels, arrays["test_y"])


def test_classes_of_arrays_are_all_numbers_up_to_the_largest_label(tmp_path):
  np.savez(tmp_path / "a.npz", t_x=np.zeros((2, 4, 4), np.uint8), t_y=np.array([0, 3]))
  assert open_images(f"{tmp_path}/a.npz:t").classes == ["0", "1", "2", "3"]


def test_gray_arrays_have_one_channel_or_none(tmp_path):
  for shape in ((2, 4, 4), (2, 4, 4, 1)):
    np.savez(tmp_path / "a.npz", t_x=np.zeros(shape, np.uint8), t_y=np.zeros(2, int))
    assert open_images(f"{tmp_path}/a.npz:t").image(0).mode == "L"


@pytest.mark.parametrize(
  ("arrays", "message"),
  [
    ({"t_x": np.zeros((2, 4, 4), np.uint8)}, "has no array 't_y'; it has t_x"),
    ({"t_x": np.zeros((2, 4, 4)), "t_y": np.zeros(2, int)}, "t_x is float64[2, 4, 4]; images are"),
    ({"t_x": np.zeros((2, 4, 4), np.uint8), "t_y": np.zeros(3, int)}, "for each of the 2 images"),
    ({"t_x": np.zeros((2, 4, 4), np.uint8), "t_y": np.zeros(2)}, "t_y is float64[2]"),
    ({"t_x": np.zeros((2, 4, 4), np.uint8), "t_y": np.full(2, -1)}, "t_y has labels below 0"),
  ],
)
def test_wrong_arrays_rejected(tmp_path, arrays, message):
  np.savez(tmp_path / "a.npz", **arrays)
  with pytest.raises(DataError, match=re.escape(message)):
    open_images(f"{tmp_path}/a.npz:t")


def test_missing_images_rejected(tmp_path):
  with pytest.raises(DataError, match=r"no file .*b\.npz'; set data\.train"):
    open_images(f"{tmp_path}/b.npz:t")
  with pytest.raises(DataError, match="no folder 'nowhere' with one folder of images per class"):
    open_images("nowhere")
  with pytest.raises(DataError, match="has no folders with images"):
    open_images(str(tmp_path))


def test_damaged_file_named(tmp_path):
  (tmp_path / "cat").mkdir()
  (tmp_path / "cat" / "a.png").write_bytes(b"\x89PNG broken")
  with pytest.raises(DataError, match=r"a\.png is no readable image"):
    open_images(str(tmp_path)).image(0)
