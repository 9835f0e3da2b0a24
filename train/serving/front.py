"""The process of HTTP: requests and answers as text; it has no model and no device.

    python -m train.serving.front CONNECTION SOCKET

Both are file descriptors; by the first come a `Served`, then the messages of an engine.
"""

import asyncio
import contextlib
import socket
import sys
from multiprocessing.connection import Connection
from typing import Any

import uvicorn

from lnssm_jax.files.reading import DataError
from lnssm_jax.pretrained.loaded import LoadedModel
from train.cli import process
from train.cluster.stop_signal import StopSignal
from train.messages import write
from train.serving import app
from train.serving.link import Link, Served

_LAST = 1.0  # second for answers when the engine is gone


def run(connection: Connection, listening: socket.socket) -> int:
  """Serves until SIGTERM, or until the engine is gone; the exit code."""
  served: Served = connection.recv()
  loaded = LoadedModel(
    served.model, served.settings, 0, served.source, list, lambda: served.tokenizer
  )
  try:
    chat = loaded.chat_template
  except DataError as error:  # which answers chats; completions need none
    chat = error
  connection.send("ready")
  link = Link(connection, loaded.model, slots=served.slots, queue=served.queue)
  config = uvicorn.Config(
    app.make(loaded, link, chat, name=served.source.name, most_tokens=served.most_tokens),
    log_level="warning",
    log_config=None,  # uvicorn's closes all handlers of the process, and absl's closes its stream
    access_log=False,
    lifespan="off",
    timeout_graceful_shutdown=30,
    limit_concurrency=served.slots + served.queue + 64,
  )
  server = uvicorn.Server(config)

  async def serve() -> None:
    loop = asyncio.get_running_loop()
    task: Any = asyncio.current_task()

    def end() -> None:
      if not server.should_exit:
        write(
          sys.stderr, "error: the process of the device has ended; so does this, with its texts.\n"
        )
      server.should_exit = True
      loop.call_later(_LAST, task.cancel)

    link.open(end)
    with contextlib.suppress(asyncio.CancelledError):
      await server.serve([listening])

  with StopSignal():  # gets the signals that uvicorn raises again when it has ended
    asyncio.run(serve(), loop_factory=config.get_loop_factory())
  connection.close()
  return int(link.lost)


if __name__ == "__main__":
  _connection, _listening = map(int, sys.argv[1:])
  process.run(lambda: run(Connection(_connection), socket.socket(fileno=_listening)))
