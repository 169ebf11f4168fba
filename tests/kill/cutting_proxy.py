"""A proxy that delays what passes through it, holds back what clients send, and cuts connections after a random
number of bytes or a random time: with a reset or in order, on both sides at once or on one first. It also plays the
outages of a service's port.

tests/client/cutting_proxy.h is not this: there a test in C++ says at which byte of which connection each
cut comes, in its own process."""

import asyncio
import collections
import contextlib
import os
import random
import socket
import struct
import threading

READ_BYTES = 65536


class Connection:
    """One connection of a client, and its own to the service."""

    def __init__(self, client, service):
        self.writers = {"client": client, "service": service}
        self.bytes_left = None  # Until the cut; None: not to be cut.
        self.cut_timer = None
        self.ended = False


# What happens to a connection in an outage. Refused: nobody listens. Reset: it is accepted and reset. Silent: it is
# accepted, and nothing passes, also after the outage.
OUTAGES = ("refused", "reset", "silent")


class CuttingProxy:
    """Forwards to `target` ("host:port" or "unix:/path") from `address`, which is of the same kind, in a thread of its
    own. Cuts nothing before `enable`, and no more than `cuts` times."""

    def __init__(self, target, seed, cuts, *, most_bytes=150_000, most_seconds=0.1, longest_delay=0.02):
        self.target = target
        self.outage = ""  # One of OUTAGES, or none.
        self.random = random.Random(seed)
        self.cuts_left = cuts
        self.most_bytes = most_bytes
        self.most_seconds = most_seconds
        self.longest_delay = longest_delay
        self.done = collections.Counter()  # Cuts by kind.
        self.enabled = False
        self.passes = asyncio.Event()  # What clients send.
        self.passes.set()
        self.connections = set()
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="proxy")
        self.thread.start()
        self.address = f"{target}.proxy" if self.is_unix() else "127.0.0.1:0"
        self.call(self.listen())

    def call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def enable(self):
        async def run():
            self.enabled = True
            for connection in self.connections:
                self.plan(connection)
        self.call(run())

    def is_unix(self):
        return self.target.startswith("unix:")

    def begin_outage(self, outage):
        """Ends every connection with a reset. What becomes of those that come meanwhile: see OUTAGES."""
        async def run():
            self.outage = outage
            if outage == "refused":
                self.server.close()
            for connection in list(self.connections):
                self.end(connection, reset=True)
        self.call(run())

    def end_outage(self):
        async def run():
            if self.outage == "refused":
                await self.listen()
            self.outage = ""
        self.call(run())

    def hold(self):
        """What clients send waits here until `release`."""
        async def run():
            self.passes.clear()
        self.call(run())

    def release(self):
        async def run():
            self.passes.set()
        self.call(run())

    def stop(self):
        async def run():
            self.server.close()
            for connection in list(self.connections):
                self.end(connection)
            tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self.call(run())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    # ---------------------------------------------------------------- in the proxy's thread

    async def listen(self):
        if self.is_unix():
            path = self.address.removeprefix("unix:")
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            self.server = await asyncio.start_unix_server(self.accept, path)
        else:
            host, _, port = self.address.rpartition(":")
            self.server = await asyncio.start_server(self.accept, host, int(port))
            self.address = "%s:%d" % self.server.sockets[0].getsockname()[:2]

    async def accept(self, client_reader, client_writer):
        if self.outage == "silent":
            connection = Connection(client_writer, client_writer)
            self.connections.add(connection)
            return
        if self.outage:
            client_writer.transport.abort()
            return
        try:
            if self.is_unix():
                opened = await asyncio.open_unix_connection(self.target.removeprefix("unix:"))
            else:
                host, _, port = self.target.rpartition(":")
                opened = await asyncio.open_connection(host, int(port))
            service_reader, service_writer = opened
        except OSError:
            client_writer.transport.abort()
            return
        connection = Connection(client_writer, service_writer)
        for writer in connection.writers.values():
            if not self.is_unix():
                writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connections.add(connection)
        if self.enabled:
            self.plan(connection)
        await asyncio.gather(self.pump(client_reader, connection, "service"),
                             self.pump(service_reader, connection, "client"))
        self.end(connection)

    def plan(self, connection):
        """When this connection is cut."""
        if self.cuts_left <= 0:
            return
        self.cuts_left -= 1
        if self.random.random() < 0.5:
            connection.bytes_left = self.random.randrange(self.most_bytes)
        else:
            connection.cut_timer = self.loop.call_later(
                self.random.uniform(0, self.most_seconds), self.cut, connection)

    async def pump(self, reader, connection, to):
        writer = connection.writers[to]
        try:
            while data := await reader.read(READ_BYTES):
                if self.enabled and self.random.random() < 0.1:
                    await asyncio.sleep(self.random.uniform(0, self.longest_delay))
                if to == "service":
                    await self.passes.wait()
                if connection.ended:
                    return
                if connection.bytes_left is None:
                    writer.write(data)
                    await writer.drain()
                    continue
                writer.write(data[:connection.bytes_left])  # A part of a frame, as a rule.
                connection.bytes_left -= min(len(data), connection.bytes_left)
                if connection.bytes_left == 0:
                    self.cut(connection)
                    return
                await writer.drain()
        except OSError:
            pass  # One end is gone; the other hears of it now.
        if not connection.ended:
            self.end(connection)

    def cut(self, connection):
        if connection.ended:
            return
        how = self.random.choice(["reset", "orderly"])
        first = self.random.choice(["both", "client", "service"])
        self.done[f"{how}, {first}"] += 1
        if first == "both":
            self.end(connection, reset=how == "reset")
            return
        # The other end believes in the connection for a while.
        connection.ended = True
        self.close(connection.writers[first], how == "reset")
        self.loop.call_later(self.random.uniform(0, self.longest_delay), self.end, connection)

    def end(self, connection, reset=False):
        connection.ended = True
        self.connections.discard(connection)
        if connection.cut_timer is not None:
            connection.cut_timer.cancel()
        for writer in connection.writers.values():
            self.close(writer, reset)

    @staticmethod
    def close(writer, reset):
        if writer.transport.is_closing():
            return
        if reset:
            linger_not = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger_not)
            writer.transport.abort()
        else:
            writer.close()
