"""A server of OpenAI's streams whose delays are known: a script in a thread. Makes no tokens."""

import asyncio
import json
import threading
from contextlib import contextmanager

FIRST, GAP, TOKENS = 0.12, 0.03, 5  # seconds to the first token, between tokens; their number


class ScriptedServer:
    """Requests that the server has received, and its answers."""

    def __init__(self):
        self.bodies: list[dict] = []
        self.paths: list[str] = []
        self.first, self.gap = FIRST, GAP
        self.silent_tokens = 0  # of the first tokens, those whose text is held back
        self.tells_ids = True  # of such tokens
        self.fails = False
        self.num_open = self.max_open = 0

    async def answer(self, reader, writer):
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                method, path, _ = head.split(b" ", 2)
                length = 0
                for line in head.lower().split(b"\r\n"):
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                body = await reader.readexactly(length)
                self.paths.append(path.decode())
                if method == b"GET":
                    self._whole(writer, path)
                    continue
                self.bodies.append(json.loads(body or b"{}"))
                self.num_open += 1
                self.max_open = max(self.max_open, self.num_open)
                await self._stream(writer)
                self.num_open -= 1
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    def _whole(self, writer, path):
        models = {"data": [{"id": "scripted"}]}
        found = path == b"/v1/models"
        body = json.dumps(models).encode() if found else b""
        status = b"200 OK" if found else b"404 Not Found"
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    async def _stream(self, writer):
        if self.fails:
            body = json.dumps({"error": {"message": "no room"}}).encode()
            writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await asyncio.sleep(self.first)
        for index in range(TOKENS):
            if index:
                await asyncio.sleep(self.gap)
            choice = {"index": 0, "text": "" if index < self.silent_tokens else " word"}
            if index < self.silent_tokens and self.tells_ids:
                choice["token_ids"] = [index]
            if index == TOKENS - 1:
                choice["finish_reason"] = "length"
            self._event(writer, {"choices": [choice]})
        usage = {"prompt_tokens": 7, "completion_tokens": TOKENS}
        self._event(writer, {"choices": [], "usage": usage})
        data = b"data: [DONE]\n\n"
        writer.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data))

    def _event(self, writer, content):
        data = b"data: " + json.dumps(content).encode() + b"\n\n"
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))


@contextmanager
def scripted_server():
    """A running server, with its `url`."""
    server, loop = ScriptedServer(), asyncio.new_event_loop()
    started = threading.Event()

    async def begin():
        listening = await asyncio.start_server(server.answer, "127.0.0.1", 0, backlog=2048)
        server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        started.set()

    def run():
        loop.create_task(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30)
