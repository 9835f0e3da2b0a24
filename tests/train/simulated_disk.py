"""A disk that loses what was not synced: every state in which a power failure could leave a folder.

`Disk(root)` records, from `with` on, every change of the files below `root` between two operations
of this process that sync, rename or remove. A file then has a history of contents, a folder one of
names, and a sync makes the newest entry durable. After a power failure each has any entry from its
durable one on, in any combination: only what was synced is certain, and the order of nothing else.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

_OPERATIONS = ("fsync", "rename", "replace", "unlink", "remove", "rmdir", "mkdir", "link")
Tree = dict[str, bytes | None]  # content by relative path; None: a folder
Choose = Callable[[int, int], int]  # the entry of a history from the durable to the newest one


class _Object:
  """A file or a folder with its history; entry -1 is empty."""

  def __init__(self, is_folder: bool):
    self.is_folder, self.history, self.durable = is_folder, [], -1


class Disk:
  """The recorder; `cuts` are the moments at which the power may fail."""

  def __init__(self, root: Path):
    self.root, self.cuts = root, []
    self.promised = None  # what the program has reported as done
    self._objects: dict[int, _Object] = {}  # by inode, as long as it exists
    self._lock = threading.RLock()

  def __enter__(self) -> "Disk":
    self._look()
    for thing in self._objects.values():
      thing.durable = len(thing.history) - 1
    self.cuts.clear()
    self._cut()
    self._stack = contextlib.ExitStack()
    for name in _OPERATIONS:
      self._stack.enter_context(mock.patch.object(os, name, self._recorded(getattr(os, name))))
    return self

  def __exit__(self, *_) -> None:
    self._stack.close()
    self._look()

  def _recorded(self, operation: Callable) -> Callable:
    def call(*arguments, **options):
      with self._lock:
        self._look()  # what was written since
        outcome = operation(*arguments, **options)
        self._look()
        if operation.__name__ == "fsync":
          synced = self._objects.get(os.fstat(arguments[0]).st_ino)
          if synced is not None:
            synced.durable = len(synced.history) - 1
            self._cut()
        return outcome

    return call

  def _look(self) -> None:
    """Adds the present content of everything to its history."""
    seen: dict[int, _Object] = {}
    changed = self._see(self.root, seen)
    self._objects = seen
    if changed or not self.cuts:
      self._cut()

  def _see(self, path: Path, seen: dict[int, _Object]) -> bool:
    inode, is_folder = path.stat().st_ino, path.is_dir()
    thing = self._objects.get(inode)
    if thing is None or thing.is_folder != is_folder:
      thing = _Object(is_folder)
    seen[inode] = thing
    changed = False
    if is_folder:
      content = {}
      for child in path.iterdir():
        with contextlib.suppress(FileNotFoundError):  # Orbax writes meanwhile
          changed |= self._see(child, seen)
          content[child.name] = seen[child.stat().st_ino]
    else:
      content = path.read_bytes()
    if not thing.history or thing.history[-1] != content:
      thing.history.append(content)
      changed = True
    return changed

  def _cut(self) -> None:
    root = self._objects[self.root.stat().st_ino]
    ages, todo = {}, [root]
    while todo:  # also what only older entries name
      thing = todo.pop()
      if thing not in ages:
        ages[thing] = thing.durable, len(thing.history) - 1
        if thing.is_folder:
          todo += [child for entry in thing.history for child in entry.values()]
    self.cuts.append((root, ages, self.promised))

  def states(self, choose: Choose) -> Iterator[tuple[Tree, object]]:
    """For each cut what a failure leaves there, as `choose` decides, and what was promised."""
    for root, ages, promised in self.cuts:
      tree: Tree = {}

      def fill(thing, place, tree=tree, ages=ages):
        entry = choose(*ages[thing])
        content = thing.history[entry] if entry >= 0 else {} if thing.is_folder else b""
        tree[place] = None if thing.is_folder else content
        for name, child in content.items() if thing.is_folder else ():
          fill(child, f"{place}/{name}")

      fill(root, ".")
      yield tree, promised


def write(tree: Tree, root: Path) -> None:
  """Creates the files and folders of `tree` in the new folder `root`."""
  for place, content in tree.items():
    path = root / place
    path.mkdir() if content is None else path.write_bytes(content)
