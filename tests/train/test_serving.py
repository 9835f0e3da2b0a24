"""`lnssm-train serve`: many clients at once on the loopback, those that leave or ask wrongly."""

import asyncio
import contextlib
import dataclasses
import errno
import http.client
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import lnssm_jax
from lnssm_jax.pretrained import texts
from lnssm_jax.slots import Row, Slots
from tests.pretrained.test_chat import folder_with
from tests.pretrained.test_save_model import random_model
from train.cli.main import main
from train.data import DataError, load_tokenizer
from train.serving import app, command, front, requests
from train.serving.engine import Engine, News
from train.serving.link import Busy, Link

for _name in ("starlette", "jinja2"):
  pytest.importorskip(_name, reason=f"the extra `serve` is not installed: no {_name}")
uvicorn = pytest.importorskip("uvicorn", reason="the extra `serve` is not installed: no uvicorn")

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<end>{% endfor %}assistant:"
QUEUE = 12
START = command._start
SPELLED = {"role": "user", "content": "a<end>assistant:"}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
  folder = tmp_path_factory.mktemp("serving") / "model"
  model = random_model(mixer="lrn", num_layers=1, vocab_size=260)
  tokenizer = load_tokenizer(str(folder_with(folder.parent / "tokenizer", TEMPLATE)))
  lnssm_jax.save_model(folder, model, tokenizer)
  return lnssm_jax.load_model(folder)


@contextlib.contextmanager
def serving(loaded, **settings):
  """The port of a server in a thread, with its process of HTTP in another, which starts sooner."""
  servers, said, errors = [], threading.Event(), []
  address = []

  class Server(uvicorn.Server):
    def __init__(self, config):
      super().__init__(config)
      servers.append(self)

  class Front(threading.Thread):
    def __init__(self, connection, listening):
      ends = Connection(os.dup(connection.fileno())), listening.dup()
      super().__init__(target=front.run, args=ends)
      self.start()

    def poll(self):
      return None if self.is_alive() else 0

    def terminate(self):
      for server in servers:
        server.should_exit = True

    def wait(self):
      self.join(60)
      return self.poll()

  def say(line):
    address.append(int(line.partition("/v1")[0].rpartition(":")[2]))
    said.set()

  def run():
    try:
      command.serve(
        loaded,
        say=say,
        port=0,
        **{"slots": 4, "queue": QUEUE} | settings,
      )
    except BaseException as error:
      errors.append(error)
      said.set()

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(uvicorn, "Server", Server)
    patch.setattr(command, "_start", Front)
    # It would close the handlers of this process, and what pytest captures with absl's.
    patch.setattr("logging.config.dictConfig", None)
    thread = threading.Thread(target=run)
    thread.start()
    said.wait(60)
    try:
      if errors:
        raise errors[0]
      yield address[0]
    finally:
      for server in servers:
        server.should_exit = True
      thread.join(60)
  assert not thread.is_alive() and not errors


@pytest.fixture(scope="module")
def port(loaded):
  with serving(loaded) as found:
    yield found


def ask(port, path, body=None, method=None):
  """(status, answer) of one request; of a stream the list of its events."""
  connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
  raw = body if body is None or isinstance(body, bytes) else json.dumps(body)
  connection.request(method or ("GET" if raw is None else "POST"), path, raw)
  answer = connection.getresponse()
  content = answer.read().decode()
  connection.close()
  if "event-stream" in answer.headers.get("content-type", ""):
    events = content.removesuffix("\n\n").split("\n\n")
    assert events.pop() == "data: [DONE]"
    return answer.status, [json.loads(event.removeprefix("data: ")) for event in events]
  return answer.status, json.loads(content) if content[:1] == "{" else content


def metrics(port):
  lines = ask(port, "/metrics")[1].splitlines()
  pairs = (line.split() for line in lines if not line.startswith("#"))
  return {name.removeprefix("lnssm_"): float(value) for name, value in pairs}


def wait_for(port, **wanted):
  """Waits until the metrics have these values."""
  end = time.monotonic() + 60
  while any((found := metrics(port))[name] != value for name, value in wanted.items()):
    assert time.monotonic() < end, found
    time.sleep(0.01)


HOW = {"max_tokens": 24, "temperature": 1.0, "top_p": 1.0}
CHAT = "system: be brief<end>user: hi<end>assistant:"


def prompts_of(clients):
  return [f"client {number}"[: 4 + number % 4] + str(number) for number in range(clients)]


def alone(loaded, prompts, seed, numbers=None):
  """The texts of `generate` for prompts with these numbers; `seed`: one, or one for each."""
  rows = [texts.encode_prompt(loaded.tokenizer, prompt).tolist() for prompt in prompts]
  options = dataclasses.replace(loaded.options(**HOW), seed=seed)
  return texts.complete_tokens(loaded.model, loaded.tokenizer, rows, options, numbers=numbers)


@pytest.mark.parametrize("clients", [8, pytest.param(64, marks=pytest.mark.slow)])
def test_clients_at_once_get_the_texts_of_generate(loaded, clients):
  """Nothing is lost, whether they stream or not, and all tokens are those of one call."""
  prompts, gate = prompts_of(clients), threading.Barrier(clients)
  want = alone(loaded, prompts, tuple(range(clients)))
  assert len(set(want)) == clients

  def client(number):
    body = {"prompt": prompts[number], "seed": number, **HOW}
    gate.wait()
    if number % 2:
      status, answer = ask(port, "/v1/completions", body)
      assert status == 200
      return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    status, events = ask(port, "/v1/completions", body)
    assert status == 200
    text = "".join(event["choices"][0]["text"] for event in events[:-1])
    return text, events[-1]["usage"]["prompt_tokens"]

  with serving(loaded, queue=clients) as port, ThreadPoolExecutor(clients) as pool:
    found = list(pool.map(client, range(clients)))
    counts = metrics(port)
  got, sizes = zip(*found, strict=True)
  assert list(got) == want
  assert list(sizes) == [len(prompt) for prompt in prompts]
  assert counts["finished_total"] == counts["requests_total"] == counts["first_tokens_total"]
  assert counts["finished_total"] == clients and counts["slots_used"] == counts["waiting"] == 0
  assert counts["rejected_total"] == counts["cancelled_total"] == 0


def test_choices_stops_and_chats(loaded, port):
  prompts = ["ab", "ab", "abc", "abc", CHAT, "", "", ""]  # as many as clients: one program
  *want, reply, _, _, _ = alone(loaded, prompts, 3, [0, 1, 2, 3, 0, 5, 6, 7])
  asked = {**HOW, "seed": 3}
  status, answer = ask(port, "/v1/completions", {"prompt": ["ab", "abc"], "n": 2, **asked})
  assert status == 200 and answer["object"] == "text_completion"
  assert [choice["text"] for choice in answer["choices"]] == want
  assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
  assert answer["usage"]["prompt_tokens"] == 5  # of two prompts, not of four choices
  end = want[0][4:6]
  tokens = loaded.tokenizer.encode("ab").tolist()
  body = {"prompt": tokens, "stop": end, "model": "model", "user": "me", "logprobs": None}
  _, answer = ask(port, "/v1/completions", body | asked)
  assert answer["choices"][0]["text"] == want[0].partition(end)[0] != want[0]
  assert answer["choices"][0]["finish_reason"] == "stop"
  end = want[0][7:9]  # of which a stream gets the first part before the second
  body = {"prompt": "ab", "stop": end, **asked, "stream": True}
  pieces = [event["choices"][0]["text"] for event in ask(port, "/v1/completions", body)[1]]
  assert "".join(pieces) == want[0].partition(end)[0]  # nothing of the stop string was shown
  body = {"prompt": "ab", "temperature": 0.0, "max_tokens": 16}
  text = ask(port, "/v1/completions", body)[1]["choices"][0]["text"]
  wait_for(port, slots_used=0)
  counts = metrics(port)
  ask(port, "/v1/completions", body | {"stop": text, "max_tokens": 30_000})  # it would not end
  finished = {"finished_total": counts["finished_total"] + 1}
  wait_for(port, slots_used=0, cancelled_total=counts["cancelled_total"], **finished)

  said = [{"role": "system", "content": "be brief"}]
  said += [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
  body = {"messages": said, **asked, "max_completion_tokens": 24}
  _, answer = ask(port, "/v1/chat/completions", body)
  assert answer["choices"][0]["message"] == {"role": "assistant", "content": reply}
  assert answer["object"] == "chat.completion"
  reused = metrics(port)["reused_prompt_tokens_total"] + answer["usage"]["prompt_tokens"]
  _, events = ask(port, "/v1/chat/completions", body | {"stream": True})
  parts = [event["choices"][0]["delta"] for event in events]
  assert [part.get("role") for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
  assert "".join(part["content"] for part in parts) == reply
  assert events[-1]["choices"][0]["finish_reason"] in ("length", "stop")
  assert events[0]["object"] == "chat.completion.chunk"
  assert metrics(port)["reused_prompt_tokens_total"] == reused  # the same prompt once more
  # Parts that a busy client has not read yet are joined: only a long text has surely several.
  body |= {"stream": True, "temperature": 0.0, "max_completion_tokens": 2_000}
  first, *others = ask(port, "/v1/chat/completions", body)[1]
  assert first["choices"][0]["delta"]["role"] == "assistant" and len(others) > 3
  assert not any("role" in event["choices"][0]["delta"] for event in others)
  (served,) = ask(port, "/v1/models")[1]["data"]
  assert ask(port, "/v1/models/model") == (200, served) and served["id"] == "model"
  assert ask(port, "/v1/models/other")[0] == 404
  assert ask(port, "/health") == (200, "ok")


def test_body_is_what_the_client_asks_for(loaded):
  """Every option, of an order of prompts, and the limits of a prompt with its answer."""
  limits = {"most_texts": QUEUE, "most_tokens": 12}
  parse = lambda body, chat=None: requests.parse(body, loaded, chat, **limits)
  how = {"temperature": 0.5, "top_k": 7, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.5}
  body = {"prompt": ["ab", "abcd"], "n": 2, "max_tokens": 3, "max_completion_tokens": 8}
  asked = parse({**body, **how, "seed": 5, "stop": [*"abcdefghijklmnop"]})
  encoded = lambda text: loaded.tokenizer.encode(text).tolist()
  assert [x.tolist() for x in asked.prompts] == [encoded(x) for x in ("ab", "ab", "abcd", "abcd")]
  want = loaded.options(max_tokens=8, seed=5, **how)
  assert asked.options == want and asked.until == tuple("abcdefghijklmnop")
  assert (asked.stream, asked.usage) == (False, False)
  asked = [parse({"prompt": "a", "max_tokens": 4}).options for _ in range(2)]
  assert asked[0].seed != asked[1].seed and asked[0].max_tokens == 4
  for change, message in (
    ({"prompt": ["a", "abcde"], "max_completion_tokens": 8}, "more than the 12 tokens"),
    ({"stop": [*"abcdefghijklmnopq"]}, "stop has 17 strings; give at most 16"),
    ({"best_of": 2}, "best_of=2 is not supported"),
  ):
    with pytest.raises(ValueError, match=message):
      parse(body | change)
  body = {"prompt": "<end>", "max_tokens": 1}
  for special, count in (("parse", 1), ("text", 5)):
    assert len(parse(body | {"special_tokens": special}).prompts[0]) == count
  parts = [{"type": "text", "text": text} for text in "ab"]
  said = lambda role, content: {"messages": [{"role": role, "content": content}], "max_tokens": 1}
  limits["most_tokens"] = 100
  (prompt,) = parse(said("user", parts), loaded.chat_template).prompts
  assert "user: ab" in loaded.tokenizer.decode(prompt)
  for role in ("system", "developer", "assistant"):
    parse(said(role, "<end>"), loaded.chat_template)
  with pytest.raises(ValueError, match="spells out a special token"):
    parse(said("tool", "<end>"), loaded.chat_template)


def test_clients_that_leave_free_their_slots_and_a_full_queue_rejects(port):
  """Streams and waiting texts alike; the server works on."""
  before = metrics(port)
  # Drawn texts would end by themselves, one in 260 tokens; the most probable one does not.
  long = {"prompt": "x", "max_tokens": 30_000, "temperature": 0.0}
  clients = []
  for body in (long | {"stream": True, "n": 4}, long | {"n": QUEUE}):
    raw = json.dumps(body)
    clients.append(socket.create_connection(("127.0.0.1", port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n{raw}"
    clients[-1].sendall(head.encode())
    wait_for(port, slots_used=4, waiting=QUEUE if len(clients) == 2 else 0)
  status, answer = ask(port, "/v1/completions", {"prompt": "x"})
  assert (
    status == 429 and answer["error"]["message"] == f"{QUEUE} texts are waiting; try again later."
  )
  for client in clients:
    client.close()
  cancelled = before["cancelled_total"] + 4 + QUEUE
  wait_for(port, slots_used=0, waiting=0, cancelled_total=cancelled)
  assert ask(port, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200


@pytest.mark.parametrize(
  ("path", "body", "status", "message"),
  [
    ("completions", b"{", 400, "the body is no JSON"),
    ("completions", b"[]", 400, "no object of JSON"),
    ("completions", b" " * (1 << 22) + b"{}", 413, "more than 4194304 bytes"),
    ("nothing", None, 404, "GET '/v1/nothing' is no route"),
    ("completions", None, 405, "GET '/v1/completions' is no route"),
    ("completions", {"prompt": 3}, 400, "prompt is 3, expected a string or a list"),
    ("completions", {"prompt": ["a", 3]}, 400, "prompt 1 is 3; give a text"),
    ("completions", {"prompt": []}, 400, "prompt=[] is no text"),
    ("completions", {"prompt": ["a"] * 12 + [3]}, 400, "n=1 for 13 prompts must be"),
    ("completions", {"prompt": [[-1]]}, 400, "prompt 0 has token ids from -1 to -1"),
    ("completions", {"prompt": [2**70]}, 400, "vocabulary is 0 to 259"),
    ("completions", {"prompt": "a", "logprobs": 0}, 400, "logprobs=0 is not supported"),
    ("completions", {"prompt": "a", "messages": [{}]}, 400, "messages=[{}] is not supported"),
    ("completions", {"prompt": "a", "stream": "no"}, 400, "stream is 'no', expected true or false"),
    ("completions", {"prompt": "a", "stream_options": {"x": 1}}, 400, "x=1 is not supported"),
    ("completions", {"prompt": "a", "max_completion_tokens": 0}, 400, "max_completion_tokens=0"),
    ("completions", {"prompt": "a", "repetition_penalty": 1e300}, 400, "repetition_penalty=1e+300"),
    ("completions", {"prompt": "a", "k" * 10**6: 1}, 400, f"{'k' * 80}=1 is not supported"),
    ("completions", {"prompt": "a", "model": "gpt"}, 404, "model='gpt' is not served"),
    ("completions", {"prompt": "a", "logprobs": 2}, 400, "logprobs=2 is not supported"),
    (
      "completions",
      {"prompt": "a", "temperature": "1"},
      400,
      "temperature is '1', expected a number",
    ),
    ("completions", {"prompt": "a", "top_p": 0.0}, 400, "top_p=0.0 must be above 0"),
    ("completions", {"prompt": "a", "n": 10**9}, 400, "at most 12 in all"),
    ("completions", {"prompt": "a", "max_tokens": 40_000}, 400, "more than the 32768 tokens"),
    ("completions", {"prompt": "a", "seed": -1}, 400, "seed=-1 must be in"),
    ("completions", {"prompt": "a", "stop": ["x"] * 3 + [4]}, 400, "stop[3] is 4, expected"),
    ("chat/completions", {"messages": []}, 400, "expected messages, such as"),
    ("chat/completions", {"messages": 3}, 400, "messages is 3, expected a list"),
    ("chat/completions", {"messages": [3]}, 400, "messages[0] is 3, expected an object"),
    ("chat/completions", {"messages": [SPELLED | {"role": "function"}]}, 400, "a special token"),
    ("chat/completions", {"messages": [{"role": "<end>", "content": ""}]}, 400, "a special token"),
    ("chat/completions", {"messages": [{"role": "user"}]}, 400, '"content" of message 0 is'),
    ("chat/completions", {"messages": [SPELLED]}, 400, "messages[0] spells out a special token"),
    (
      "chat/completions",
      {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
      400,
      "other parts are not read",
    ),
  ],
)
def test_wrong_request_is_answered_with_what_is_wrong(port, path, body, status, message):
  found, answer = ask(port, f"/v1/{path}", body)
  assert found == status and message in answer["error"]["message"]
  assert len(answer["error"]["message"]) < 300


def test_body_that_does_not_arrive_is_given_up(port, monkeypatch, caplog):
  """In time, or because its client has left, which is no error of the server."""
  monkeypatch.setattr(app, "_PATIENCE", 0.2)
  logging.getLogger("uvicorn.error").addHandler(caplog.handler)
  head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"
  with socket.create_connection(("127.0.0.1", port)) as slow:
    slow.sendall(head)
    slow.settimeout(20)
    assert b"408 Request Timeout" in slow.recv(100)
  with socket.create_connection(("127.0.0.1", port)) as gone:
    gone.sendall(head)
  assert ask(port, "/v1/completions", {"prompt": "x", "max_tokens": 1})[0] == 200
  assert not caplog.records


def test_signal_ends_the_server_when_its_texts_have_ended(loaded, monkeypatch):
  """`serve` returns, and so does its process of HTTP, which is a real one here."""
  monkeypatch.setattr(command, "_start", START)
  before, answers, threads = signal.signal(signal.SIGTERM, lambda *_: answers.append(None)), [], []

  def client(port):
    body = {"prompt": "x", "max_tokens": 2_000, "temperature": 0}
    answers.append(ask(port, "/v1/completions", body))

  def end(port):
    while not threads[0].is_alive() or metrics(port)["new_tokens_total"] == 0:
      time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)

  def say(line):
    port = int(line.partition("/v1")[0].rpartition(":")[2])
    threads.extend(threading.Thread(target=work, args=[port]) for work in (client, end))
    for thread in threads:
      thread.start()

  try:
    command.serve(loaded, say=say, port=0, slots=4, queue=QUEUE)
  finally:
    signal.signal(signal.SIGTERM, before)
  for thread in threads:
    thread.join()
  ((status, answer),) = answers
  assert status == 200 and answer["usage"]["completion_tokens"] == 2_000


def test_device_that_fails_ends_all_texts(loaded, monkeypatch):
  slots, (here, there) = Slots(loaded.model, 1), Pipe()
  engine, ended, lost = Engine(slots, there), [], asyncio.Event()
  rows = [Row(np.array([97]), loaded.options(max_tokens=4), n) for n in range(3)]

  def fail():
    raise RuntimeError("the device is gone")

  async def texts_of_a_server():
    link = Link(here, loaded.model, slots=1, queue=1)
    link.open(lost.set)
    with pytest.raises(Busy):
      link.submit(rows, ended.append)
    link.submit(rows[:2], ended.append)
    await asyncio.wait_for(lost.wait(), 60)
    with pytest.raises(Busy):
      link.submit(rows[2:], ended.append)
    assert app._health(link).status_code == 503
    assert "lnssm_rejected_total 4" in link.metrics()

  monkeypatch.setattr(slots, "step", fail)
  thread = threading.Thread(target=engine.run)
  thread.start()
  asyncio.run(texts_of_a_server())
  thread.join()
  assert str(engine.failure) == "the device is gone"
  assert [(drawn.row, drawn.ended) for drawn in ended] == [(row, "failed") for row in rows[:2]]


def test_long_prompt_waits_for_an_engine_that_reads_later(loaded):
  """It is more than the connection holds, which the event loop of HTTP must not cut."""
  (here, there), config = Pipe(), uvicorn.Config(None, log_config=None)
  there.send(News([], {}, {}))
  row = Row(np.zeros(1 << 17, int), loaded.options(max_tokens=1))

  async def received():
    link = Link(here, loaded.model, slots=1, queue=0)
    link.open(lambda: None)
    link.submit([row], lambda _: None)
    try:
      receive = asyncio.get_running_loop().run_in_executor(None, there.recv)
      return await asyncio.wait_for(receive, 20)
    finally:
      here.close()  # ends `receive`

  ((number, new),) = asyncio.run(received(), loop_factory=config.get_loop_factory())
  assert number == 0 and len(new.prompt) == 1 << 17


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["device", "http"])
def test_process_that_is_killed_ends_the_other_with_a_line(loaded, tmp_path, killed):
  """Soon, and the client of a text gets an error, or no answer; the folder has other modules."""
  (tmp_path / "train.py").write_text("raise SystemExit('not ours')")
  serve = [sys.executable, "-P", "-m", "train", "serve", loaded.source, "--port", "0"]
  how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
  how["env"] = os.environ | {"PYTHONPATH": str(Path(lnssm_jax.__file__).parents[1])}
  with subprocess.Popen(serve, **how) as process, ThreadPoolExecutor(1) as pool:
    port = int(process.stdout.readline().partition("/v1")[0].rpartition(":")[2])
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    body = {"prompt": "x", "max_tokens": 30_000, "temperature": 0.0}
    answer = pool.submit(ask, port, "/v1/completions", body)
    wait_for(port, first_tokens_total=1)
    begin = time.monotonic()
    os.kill(process.pid if killed == "device" else int(children), signal.SIGKILL)
    _, error = process.communicate(timeout=20)  # when both have closed it
    assert time.monotonic() - begin < 8  # 1 on an idle machine
    assert error.count("\n") == 1
    if killed == "device":
      assert answer.result()[0] == 500 and "the process of the device has ended" in error
    else:
      assert process.returncode == 1 and "HTTP has ended with exit status -9" in error
      with pytest.raises(http.client.RemoteDisconnected):
        answer.result()


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (["--slots", "0"], "error: --slots=0 must be an integer of at least 1."),
    (["--slots", "1000000000"], "error: --slots 1000000000 must be at most 65536"),
    (["--most-tokens", "0"], "error: --most-tokens=0 must be an integer of at least 1."),
    (["--prefix-memory", "-1"], "--prefix-memory -1 at least 0."),
    (["--port", "{taken}"], "address already in use; give another port"),
  ],
)
def test_server_that_cannot_start_says_why_in_a_line(loaded, port, capsys, arguments, message):
  code = main(["serve", str(loaded.source), *(x.format(taken=port) for x in arguments)])
  error = capsys.readouterr().err
  assert code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
  ("host", "number", "message"),
  [
    ("", 0, "--host '' --port 0: it is empty; give an address of this machine, as 127.0.0.1"),
    ("a\0b", 0, r"--host 'a\\x00b' --port 0: .*; give an address of this machine"),
    ("\ud800", 0, "; give an address of this machine"),
    ("192.0.2.1", 0, "annot assign requested address; give an address of this machine"),
    ("127.0.0.1", 65_536, "--port 65536 must be from 0 to 65535; 0 takes a free one"),
    ("127.0.0.1", -1, "--port -1 must be"),
  ],
)
def test_address_that_cannot_be_listened_at_is_named_with_a_fix(host, number, message):
  with pytest.raises(ValueError, match=message):
    command._listening(host, number)


def test_address_in_the_form_of_a_url_and_a_name_of_two_kinds_are_listened_at(monkeypatch):
  both = [
    (socket.AF_INET6, 1, 6, "", ("::1", 0, 0, 0)),
    (socket.AF_INET, 1, 6, "", ("127.0.0.1", 0)),
  ]
  asked = []
  monkeypatch.setattr(socket, "getaddrinfo", lambda name, *_, **__: asked.append(name) or both)
  for host in ("[::1]", "localhost"):
    with command._listening(host, 0) as listening:
      assert listening.getsockname()[0] == "127.0.0.1"
  assert asked == ["::1", "localhost"]


def test_port_that_needs_privileges_is_named(monkeypatch):
  denied = PermissionError(errno.EACCES, "Permission denied (while attempting to bind)")
  monkeypatch.setattr(socket, "create_server", mock.Mock(side_effect=denied))
  message = "--port 80: permission denied; give a port from 1024 on, as those below need privileges"
  with pytest.raises(DataError, match=message):
    command._listening("127.0.0.1", 80)
