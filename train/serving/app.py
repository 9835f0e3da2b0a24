"""Routes of the server: the completions and chats of the OpenAI API, and how it is doing."""

import asyncio
import contextlib
import functools
import json
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from lnssm_jax import generate
from lnssm_jax.files.checked_json import parse
from lnssm_jax.files.reading import DataError
from lnssm_jax.pretrained.chat import ChatTemplate
from lnssm_jax.pretrained.continuations import Continuation
from lnssm_jax.pretrained.loaded import LoadedModel
from lnssm_jax.slots import Drawn, Row
from train.serving import requests
from train.serving.link import Busy, Link

_MAX_BODY = 1 << 22  # bytes
_SHORT = 1 << 12  # bytes of a body whose text is encoded sooner than a thread begins
_PATIENCE = 30.0  # seconds for a body
_RETRY = {"Retry-After": "1"}
# Of requests, at once. The event loop shares Python's lock with them: more would have it wait for
# each in turn when many requests come together.
_READERS = 2


class HttpError(Exception):
  """An answer with a status and a message."""

  def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None):
    super().__init__(message)
    self.status, self.headers = status, headers


def make(
  loaded: LoadedModel,
  link: Link,
  chat: ChatTemplate | DataError,
  *,
  name: str,
  most_tokens: int,
) -> Starlette:
  """The application of a model; `most_tokens` are those of a prompt and its answer."""
  readers = ThreadPoolExecutor(_READERS)
  answer = functools.partial(_answer, loaded, link, name, most_tokens, readers)
  model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "lnssm_jax"}
  models, get = {"object": "list", "data": [model]}, ["GET"]
  routes = [
    Route("/v1/completions", functools.partial(answer, None), methods=["POST"]),
    Route("/v1/chat/completions", functools.partial(answer, chat), methods=["POST"]),
    Route("/v1/models", lambda _: JSONResponse(models), methods=get),
    Route("/v1/models/{asked:path}", functools.partial(_model, model), methods=get),
    Route("/health", lambda _: _health(link), methods=get),
    Route("/metrics", lambda _: PlainTextResponse(link.metrics()), methods=get),
  ]
  handlers = {HttpError: _error, HTTPException: _no_route, ClientDisconnect: _gone, Exception: _bug}
  return Starlette(routes=routes, exception_handlers=handlers)


def _error(_: HttpRequest, error: Any) -> Response:
  kind = "invalid_request_error" if error.status < 500 else "server_error"
  body = {"error": {"message": str(error), "type": kind, "param": None, "code": None}}
  return JSONResponse(body, error.status, error.headers)


def _no_route(http: HttpRequest, error: Any) -> Response:
  message = f"{http.method} {http.url.path!r:.80} is no route of this server; see docs/serving.md."
  return _error(http, HttpError(error.status_code, message, error.headers))


def _gone(*_) -> Response:
  return Response(status_code=499)  # nobody reads it


def _bug(http: HttpRequest, _: Exception) -> Response:
  """The client's part of a bug; the server's log has the traceback."""
  return _error(http, HttpError(500, "the server failed at this request; its log says how."))


def _health(link: Link) -> Response:
  return PlainTextResponse(*(("failed", 503) if link.lost else ("ok", 200)))


def _model(model: Mapping[str, Any], http: HttpRequest) -> Response:
  _check_name(http.path_params["asked"], model["id"])
  return JSONResponse(model)


def _check_name(asked: str | None, name: str) -> None:
  """Raises unless the model that a request names, if it does, is this one."""
  if asked not in (None, name):
    raise HttpError(404, f"model={asked!r:.80} is not served; this is {name!r}.")


async def _answer(
  loaded: LoadedModel,
  link: Link,
  name: str,
  most_tokens: int,
  readers: ThreadPoolExecutor,
  chat: ChatTemplate | DataError | None,
  http: HttpRequest,
) -> Response:
  body, size = await _body(http)
  _check_name(body.get("model"), name)
  limits = {"most_texts": link.queue, "most_tokens": most_tokens}
  try:
    read = functools.partial(requests.parse, body, loaded, chat, **limits)
    loop = asyncio.get_running_loop()
    asked = read() if size <= _SHORT else await loop.run_in_executor(readers, read)
    choices = _Choices(loaded, link, asked)
    choices.submit()
  except ValueError as error:
    raise HttpError(400, str(error)) from None
  except Busy:
    raise HttpError(429, f"{link.queue} texts are waiting; try again later.", _RETRY) from None
  form = _Form(name, chat is not None)
  if asked.stream:
    return _Stream(choices, form, asked.usage)
  gone = asyncio.create_task(_until_gone(http, choices))
  try:
    return JSONResponse(form.whole(await choices.whole(), choices.usage))
  finally:
    gone.cancel()
    choices.close()


async def _body(http: HttpRequest) -> tuple[dict[str, Any], int]:
  """The object of a request's body, and the bytes of that."""
  raw = bytearray()
  try:
    async with asyncio.timeout(_PATIENCE):
      async for part in http.stream():
        raw += part
        if len(raw) > _MAX_BODY:
          raise HttpError(413, f"the body has more than {_MAX_BODY} bytes.")
  except TimeoutError:
    message = f"the body has not arrived within {_PATIENCE:g} seconds; send it faster."
    raise HttpError(408, message, {"Connection": "close"}) from None
  try:
    body = parse(bytes(raw))
  except ValueError as error:
    raise HttpError(400, f"the body is no JSON: {error}.") from None
  if not isinstance(body, dict):
    raise HttpError(400, "the body is no object of JSON.")
  return body, len(raw)


async def _until_gone(http: HttpRequest, choices: "_Choices") -> None:
  while (await http.receive())["type"] != "http.disconnect":
    pass
  choices.leave()


class _Choices:
  """The texts of one request while they grow; used by the thread of the event loop."""

  def __init__(self, loaded: LoadedModel, link: Link, asked: requests.Request):
    self._loaded, self._link = loaded, link
    self._rows = [Row(prompt, asked.options, n) for n, prompt in enumerate(asked.prompts)]
    tokenizer, until = loaded.tokenizer, asked.until
    self._texts = [Continuation(tokenizer, row.prompt.tolist(), until) for row in self._rows]
    self._news: asyncio.Queue[Drawn | None] = asyncio.Queue()  # None: the client has left
    self._left, self._at_once = set(self._rows), not (asked.stream or asked.until)
    own = {id(prompt): len(prompt) for prompt in asked.prompts}  # one for all choices of a prompt
    self.prompt_tokens, self.new_tokens = sum(own.values()), 0

  def submit(self) -> None:
    self._link.submit(self._rows, self._news.put_nowait, at_once=self._at_once)

  def leave(self) -> None:
    """Ends `pieces` with a ClientDisconnect."""
    self._news.put_nowait(None)

  def close(self) -> None:
    """Gives up what has not ended."""
    if self._left:
      self._link.cancel(list(self._left))
      self._left.clear()

  @property
  def usage(self) -> dict[str, int]:
    prompt, new = self.prompt_tokens, self.new_tokens
    return {"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new}

  async def pieces(self) -> AsyncGenerator[tuple[int, str, str | None]]:
    """(number of the choice, new text, why it ended or None), as texts grow."""
    shown = [0] * len(self._rows)
    while self._left:
      drawn = await self._news.get()
      if drawn is None:
        raise ClientDisconnect
      row, tokens, ended = drawn
      if row not in self._left:
        continue  # it had found one of `until`
      number, text = row.number, self._texts[row.number]
      if ended in ("nan", "failed"):
        place = f"prompt {number}, new token {row.drawn}"
        nan = ended == "nan"
        raise HttpError(
          500,
          generate.not_a_number(place, self._loaded.model) if nan else "the server has stopped.",
        )
      text.add(tokens)
      self.new_tokens += len(tokens)
      if text.ended and ended is None:
        self._link.cancel([row], finished=True)
      if text.ended:
        ended = "stop"
      now = text.shown if ended is None else text.text
      if ended:
        self._left.discard(row)
      if ended or len(now) > shown[number]:
        yield number, now[shown[number] :], ended
        shown[number] = len(now)

  async def whole(self) -> list[tuple[str, str | None]]:
    """(text, why it ended) of each choice."""
    found: list[tuple[str, str | None]] = [("", None)] * len(self._rows)
    async for number, piece, ended in self.pieces():
      found[number] = found[number][0] + piece, ended
    return found


class _Form:
  """Objects of the OpenAI API, of completions or of chats."""

  def __init__(self, model: str, chat: bool):
    self._chat = chat
    kind = "chat.completion" if chat else "text_completion"
    ident = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
    self._head = {"id": ident, "object": kind, "created": int(time.time()), "model": model}

  def whole(self, found: Sequence[tuple[str, str | None]], usage: Mapping[str, int]) -> Any:
    choices = []
    for number, (text, ended) in enumerate(found):
      said = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
      choices.append({"index": number, **said, "logprobs": None, "finish_reason": ended})
    return {**self._head, "choices": choices, "usage": usage}

  def part(self, number: int, piece: str, ended: str | None, *, first: bool) -> Any:
    said: Any = {"text": piece}
    if self._chat:
      said = {"delta": ({"role": "assistant"} if first else {}) | {"content": piece}}
    choice = {"index": number, **said, "logprobs": None, "finish_reason": ended}
    return self.chunk([choice])

  def chunk(self, choices: list[Any], **more: Any) -> Any:
    head = self._head | ({"object": "chat.completion.chunk"} if self._chat else {})
    return {**head, "choices": choices, **more}


class _Stream(StreamingResponse):
  """Server-sent events; a client that has left ends them wherever they are."""

  def __init__(self, choices: _Choices, form: _Form, usage: bool):
    super().__init__(_events(choices, form, usage), media_type="text/event-stream")
    self._choices = choices

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:
      self._choices.close()


async def _events(choices: _Choices, form: _Form, usage: bool) -> AsyncIterator[str]:
  """Server-sent events of a stream."""
  event, begun = (lambda value: f"data: {json.dumps(value)}\n\n"), set()
  try:
    async with contextlib.aclosing(choices.pieces()) as pieces:
      async for number, piece, ended in pieces:
        yield event(form.part(number, piece, ended, first=number not in begun))
        begun.add(number)
    if usage:
      yield event(form.chunk([], usage=choices.usage))
  except HttpError as error:
    yield event({"error": {"message": str(error), "type": "server_error"}})
  yield "data: [DONE]\n\n"
