"""Linear attention over a few of many states; README.md derives its methods."""
