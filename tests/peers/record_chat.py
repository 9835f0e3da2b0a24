"""Records what transformers makes of conversations, by chat templates of each kind.

    .venv-peers/bin/python -m tests.peers.record_chat

Part of `make test-peers`. golden/chat.json keeps the text of each conversation, its prompt, and the
places of the replies, which the templates mark for transformers by `generation`.
"""

import json
from pathlib import Path

from transformers.utils.chat_template_utils import render_jinja_template

from tests.peers.chats import TALKS, TEMPLATES, TOKENS

GOLDEN = Path(__file__).parents[1] / "pretrained" / "golden" / "chat.json"
CASES = [(name, "turns") for name in TEMPLATES] + [("thinking", "calls")]


def main() -> None:
  found = {}
  for template, talk in CASES:
    how = {"chat_template": TEMPLATES[template], **TOKENS}
    how |= {"tools": [{"name": "add"}] if talk == "calls" else None}
    messages = TALKS[talk]
    (text,), (places,) = render_jinja_template([messages], return_assistant_tokens_mask=True, **how)
    (prompt,), _ = render_jinja_template([messages[:1]], add_generation_prompt=True, **how)
    found[f"{template}/{talk}"] = {"text": text, "prompt": prompt, "places": places}
  GOLDEN.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
  print(GOLDEN.name)


if __name__ == "__main__":
  main()
