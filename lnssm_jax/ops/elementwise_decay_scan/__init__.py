"""Linear attention whose decay has its own value for every state entry; README.md derives it."""
