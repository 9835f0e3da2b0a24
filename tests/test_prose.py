"""Text of the project: standard words in docstrings, comments, messages and pages."""

import ast
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Word -> its replacement. The patterns are split so that this file does not match itself.
WORDS = {
  r"\bbord" r"ers?\b": "boundary",
  r"\bnormal" r"is|\boptim" r"is[ei]|\binitial" r"is|\brematerial" r"is|\butil" r"is": "-iz-",
  r"\btoken" r"is[ei]|\bsummar" r"is|\bspecial" r"is[ei]|\bserial" r"is|\brecogn" r"is": "-iz-",
  r"\bneighbo" r"ur|\bcolo" r"ur|\bbehavio" r"ur|\bfavo" r"ur": "-or",
  r"\ba step and (head|layer|channel|key)|\ba decay a " r"step\b": "per token and head",
  r"\b(ms|(milli)?seconds|bytes|tokens) a " r"(step|token|second|head|layer)\b": "per step",
  r"\bblocks? of " r"threads\b": "CTA, thread block",
  r"\bmulti" r"processors?\b": "SM",
  r"\ban" r"ew\b|\baf" r"resh\b": "again; resets",
  r"\bgoes " r"on\b": "continues, resumes",
  r"\bway " r"back\b": "backward pass",
  r"\b(is|are|was|what) (owed|du" r"e)\b(?! to)": "gradient, cotangent",
  r"\bobst" r"acle": "unsupported (reason)",
  r"\bworth" r"while\b": "preferred",
  r"leaves " r"behind": "state after the last token",
  r"\bbes" r"ide\b": "next to",
  r"\bdivided over|\bdivided between " r"devices": "sharded over",
  r"\bdepends on the " r"input\b": "data-dependent",
  r"\brefus" r"(e|ed|es|al)\b": "rejected, raises",
}


def tracked(*patterns: str) -> list[Path]:
  if not (ROOT / ".git").exists():  # a source distribution
    return [path for pattern in patterns for path in ROOT.rglob(pattern) if path.is_file()]
  listed = subprocess.run(
    ["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
  )
  return [path for name in listed.stdout.splitlines() if (path := ROOT / name).is_file()]


def test_texts_use_the_standard_words():
  found = []
  for path in tracked("*.py", "*.pyi", "*.md", "*.toml", "Makefile"):
    text = path.read_text()
    for word, better in WORDS.items():
      for match in re.finditer(word, text, re.IGNORECASE):
        number = text.count("\n", 0, match.start()) + 1
        found.append(f"{path.relative_to(ROOT)}:{number}: {match[0]!r}, better: {better}")
  assert not found, "\n".join(found)


def test_docstrings_do_not_begin_with_what():
  documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
  found = []
  for path in tracked("*.py"):
    text = path.read_text()
    if not re.search(r"[\"']\s*What ", text):
      continue
    for node in ast.walk(ast.parse(text)):
      if isinstance(node, documented) and (ast.get_docstring(node) or "").startswith("What "):
        found.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', '(module)')}")
  assert not found, "\n".join(found)
