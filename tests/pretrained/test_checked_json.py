"""JSON from elsewhere: what is rejected, and that the shape's errors name their place."""

import re

import pytest

from lnssm_jax.files.checked_json import MAX_DEPTH, check_shape, parse
from lnssm_jax.files.printable import MAX_LINE, PrintableError, printable
from lnssm_jax.files.reading import DataError, read_json
from lnssm_jax.pretrained.manifest import ExportError


@pytest.mark.parametrize(
  ("text", "why"),
  [
    ("[" * 100_000, "nested too deeply"),
    ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply, in more than 100"),
    ('{"a":' * 500 + "1" + "}" * 500, "nested too deeply, in more than 100"),
    ('{"a": ' + "1" * 5_000 + "}", "a number has 5,000 digits"),
    ('{"a": ' + "1" * 310 + "}", "a number has 310 digits"),
    ('{"a": 1e999}', "the number 1e999 is too large"),
    ('{"a": NaN}', "NaN is no number of JSON"),
    ('{"a": -Infinity}', "-Infinity is no number of JSON"),
    ('{"a": 1, "b": {"c": 2, "c": 3}}', "an object has a duplicate key, 'c'"),
    (r'{"a": ["x", {"b": "x\ud800y"}]}', "an unpaired surrogate at character 1"),
    (r'{"\uD800": 1}', "an unpaired surrogate at character 0"),
    (b'{"a": "\xff"}', r"not UTF-8 at byte 7 \(0xff\)"),
    ("{]", "not JSON: .* at column 2"),
    ("{\n]", "not JSON: .* at line 2, column 1"),
    ("", "not JSON"),
  ],
)
def test_text_that_readers_cannot_use_is_one_value_error(text, why):
  with pytest.raises(ValueError, match=why) as found:
    parse(text)
  assert "\n" not in str(found.value)
  assert len(str(found.value)) < 200


def test_text_at_the_bounds_is_read():
  assert parse("[" * MAX_DEPTH + "]" * MAX_DEPTH)
  assert parse("9" * 300) == int("9" * 300)
  assert parse(b'\xef\xbb\xbf{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


def test_files_of_other_programs_may_have_infinity_and_halves_of_pairs():
  assert parse('{"a": [0.0, Infinity]}', strict=False) == {"a": [0.0, float("inf")]}
  assert parse(r'["\ud800"]', strict=False) == ["\ud800"]
  with pytest.raises(ValueError, match="duplicate"):
    parse('{"a": 1, "a": 1}', strict=False)


SHAPE = {
  "step": int,
  "loss?": float,
  "sets": [{"name": str, "bits": (float, None)}],
  "by": {str: int},
}
GOOD = {"step": 1, "loss": 2, "sets": [{"name": "a", "bits": None}], "by": {"x": 1}, "more": ()}


@pytest.mark.parametrize(
  ("change", "why"),
  [
    ({"step": True}, "step is True, expected a whole number"),
    ({"step": 1.0}, "step is 1.0, expected a whole number"),
    ({"loss": "2"}, "loss is '2', expected a number"),
    ({"loss": False}, "loss is False, expected a number"),
    ({"sets": {}}, "sets is {}, expected a list"),
    ({"sets": ["a"]}, r"sets\[0\] is 'a', expected an object"),
    ({"sets": [{"name": "a"}]}, r"sets\[0\] has no 'bits', a number or null"),
    ({"sets": [{"name": "a", "bits": []}]}, r"sets\[0\].bits is \[\], expected a number or null"),
    ({"by": {"x": None}}, "by.'x' is None, expected a whole number"),
    ({"by": {"\x1b[2J": "y" * 10_000}}, "by.'.x1b.2J' is 'yyy"),
  ],
)
def test_shapes_name_the_place(change, why):
  check_shape(GOOD, SHAPE)
  with pytest.raises(ValueError, match=re.compile(why)) as found:
    check_shape(GOOD | change, SHAPE)
  assert len(str(found.value)) < 200


def test_missing_key_is_named():
  with pytest.raises(ValueError, match="it has no 'step', a whole number"):
    check_shape({}, SHAPE)


def test_objects_of_files_have_their_shape(tmp_path):
  path = tmp_path / "a.json"
  path.write_text('{"tokens": "5"}')
  assert read_json(path, 100) == {"tokens": "5"}
  with pytest.raises(ValueError, match=r"a.json: tokens is '5', expected a whole number"):
    read_json(path, 100, shape={"tokens": int})


HOSTILE = "a\x1b]0;title\x07\x1b[2J\r\nerror: all is well\u202e\x9b1m\u2028b\udcff"


def test_control_characters_are_escaped_once():
  text = printable(HOSTILE)
  assert text.isprintable()
  assert text.isascii()
  assert text == printable(text)
  assert text.startswith(r"a\x1b]0;title\x07\x1b[2J\r\nerror: all is well\u202e\x9b1m\u2028b\udcff")
  assert printable("été 你 👩‍💻\n\tx", keep="\n\t") == "été 你 👩‍💻\n\tx"


def test_long_text_keeps_its_ends():
  text = printable("a" * 600 + "b" * 10**6 + "c" * 200, 800)
  assert text == "a" * 600 + "... (1,000,800 characters) ..." + "c" * 200


@pytest.mark.parametrize("kind", [DataError, ExportError])
def test_errors_show_names_from_elsewhere_as_one_line(kind):
  error = kind(f"{HOSTILE} is no tensor of {'x' * 10**6}; fix it.")
  assert str(error).isprintable()
  assert str(error).endswith("x; fix it.")
  assert len(str(error)) < 2 * MAX_LINE
  assert str(kind("two", "lines\n")) == "two\nlines\\n"
  assert issubclass(kind, PrintableError)
