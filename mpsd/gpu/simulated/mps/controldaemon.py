"""Stand-in for the control daemon: its sockets, its servers, and clients that wait for a server.

One server at a time. A client of another user waits until the present server has no clients, and then gets a
server of its own user, unless the daemon was started for many users. `commands` answers the front end.

The files have the stock modes, so the mode of the directory decides who reaches them: `control` and the FIFO
`log` are open to every user, a connection to `control_privileged` needs root.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time

from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.mps.commands import Commands

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from mpsd.gpu.simulated.mps.logbook import Logbook
    from mpsd.gpu.simulated.packets import Message

FILES = ("control", "control_privileged", "log", f"{paths.CONTROL_NAME}.pid")
# Interval of checks for an empty server while another user's client waits for it.
_DRAIN_CHECK_S = 0.02


class ServerProcess:
    """A child process. `link` closes at its end; `ready` once it takes clients."""

    def __init__(self, pid: int, uid: int, link: socket.socket) -> None:
        self.pid, self.uid, self.link = pid, uid, link
        self.pidfd = os.pidfd_open(pid)
        self.ready = False
        self.stopping = False
        self.settings: dict[str, str] = {}


class Daemon:
    """Serve one pipe directory until quit, the end of the simulated GPU, or a kill."""

    def __init__(
        self, directory: str, gpu: socket.socket, logbook: Logbook, log_fd: int, *, multiuser: bool
    ) -> None:
        self.directory = directory
        self.pipe_dir = paths.pipe_directory(os.environ)
        self.logbook = logbook
        self.multiuser = multiuser
        self.servers: dict[int, ServerProcess] = {}
        self._server_log = log_fd
        self._pending: list[tuple[socket.socket, Message]] = []
        self._gpu = gpu
        self.gpus = self._visible(self.ask_gpu({"op": "node"})["gpus"])
        self._selector = selectors.DefaultSelector()
        self._running = True
        self._deadline: float | None = None
        self._quitting: list[socket.socket] = []
        self._front_end: socket.socket | None = None
        self.quit_requested = False
        self.commands = Commands(self)
        for name in ("control", "control_privileged"):
            # Every user's clients use the first socket; credentials decide about permission for commands.
            listener = packets.listen(
                os.path.join(self.pipe_dir, name), 0o666 if name == "control" else 0o755
            )
            self._watch(listener, lambda listener=listener: self._accept(listener))  # type: ignore[misc]
        self._watch(gpu, self._gpu_readable)
        # Opened for writing too: without a writer the FIFO would always be readable.
        self._fifo = os.open(os.path.join(self.pipe_dir, "log"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._watch(self._fifo, self._fifo_readable)

    # -- the loop ---------------------------------------------------------------------------------------

    def run(self) -> int:
        while self._running:
            busy = self._pending or self._deadline is not None or self.quit_requested
            for key, _ in self._selector.select(_DRAIN_CHECK_S if busy else None):
                if key.fd in self._selector.get_map():
                    key.data()
            self._turn()
        self._end()
        return 0

    def _turn(self) -> None:
        """Continue work that a timer or the exit of a process has made possible."""
        if self.quit_requested:
            self._progress_quit()
        elif self._pending:
            self._serve_pending()

    def _watch(self, sock: socket.socket | int, action: Callable[[], None]) -> None:
        if isinstance(sock, socket.socket):
            sock.setblocking(False)
        self._selector.register(sock, selectors.EVENT_READ, action)

    def _forget(self, sock: socket.socket) -> None:
        self._selector.unregister(sock)
        sock.close()

    def ask_gpu(self, message: Message) -> Message:
        """Send a query that the GPU process answers at once. Raises Gone."""
        self._gpu.settimeout(5.0)
        answer, _ = packets.call(self._gpu, message)
        self._gpu.setblocking(False)
        return answer

    def ask_gpu_later(self, message: Message, done: Callable[[Message], None]) -> None:
        """Send a query that may stay unanswered for any time."""
        try:
            sock = packets.connect(paths.gpu_socket(self.directory))
            packets.send(sock, message)
        except packets.Gone:
            done({})
            return

        def readable() -> None:
            try:
                answer, _ = packets.receive(sock)
            except BlockingIOError:
                return
            except packets.Gone:
                answer = {}
            self._forget(sock)
            done(answer)

        self._watch(sock, readable)

    def _gpu_readable(self) -> None:
        try:
            packets.receive(self._gpu)
        except BlockingIOError:
            return
        except packets.Gone:
            # The node has ended, and with it all that this daemon could do.
            self._running = False

    def _fifo_readable(self) -> None:
        """Discard what a process wrote into the FIFO, and log nothing any more, as the stock daemon does."""
        os.read(self._fifo, packets.LIMIT)
        self.logbook.silent = True
        for server in self.servers.values():
            try:
                packets.send(server.link, {"silent": True})
            except (packets.Gone, BlockingIOError):
                continue

    def _visible(self, gpus: list[Message]) -> list[Message]:
        names = [n.strip() for n in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if n.strip()]
        if not names:
            return gpus
        return [g for name in names for g in gpus if name in (g["uuid"], str(g["index"]))]

    # -- connections ------------------------------------------------------------------------------------

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        self.logbook.write("Control", "Accepting connection...")
        self._watch(sock, lambda: self._first(sock))

    def _first(self, sock: socket.socket) -> None:
        try:
            message, fds = packets.receive(sock)
        except BlockingIOError:
            return
        except packets.Gone:
            self._drop(sock)
            return
        packets.close_all(fds)
        if "ui" in message and self._front_end is not None:
            # Stock serves one front end at a time and closes further connections.
            self._drop(sock)
        elif "ui" in message:
            self._command(sock, str(message["ui"]))
        elif "client" in message:
            self.logbook.write("Control", "User did not send valid credentials")
            self.logbook.write("Control", "Accepting connection...")
            self._client(sock, message)
        else:
            self._drop(sock)

    def _drop(self, sock: socket.socket) -> None:
        self._pending = [(s, m) for s, m in self._pending if s is not sock]
        self._quitting = [s for s in self._quitting if s is not sock]
        if sock is self._front_end:
            self._front_end = None
        self._forget(sock)

    def answer(self, sock: socket.socket, message: Message | str) -> None:
        try:
            packets.send(sock, message)
        except (BlockingIOError, packets.Gone):
            pass
        if sock.fileno() >= 0:
            self._drop(sock)

    def _command(self, sock: socket.socket, text: str) -> None:
        self.logbook.write("Control", "NEW UI")
        _, uid, _ = packets.peer(sock)
        self._front_end = sock
        if not self.commands.knows(text):
            # Of any user: what strangers write is in the log of an open domain.
            self.logbook.write("Control", f"Cmd:{next(iter(text.splitlines()), '')}")
            self.reply(sock, self.commands.unknown(text))
            return
        if uid not in (0, os.getuid()):
            self.reply(sock, "Permission denied", logged=False)
            return
        self.logbook.write("Control", f"Cmd:{text}")
        reply = self.commands.run(text, sock)
        if reply is not None:
            self.reply(sock, reply)

    def reply(self, sock: socket.socket, text: str, *, logged: bool = True) -> None:
        """Answer a front end and log it as stock does."""
        if sock is self._front_end:
            self._front_end = None
        if text and logged:
            self.logbook.write("Control", text)
        self.logbook.write("Control", "UI closed")
        if sock.fileno() >= 0:
            self.answer(sock, text)

    # -- clients ----------------------------------------------------------------------------------------

    def _client(self, sock: socket.socket, message: Message) -> None:
        pid, uid, _ = packets.peer(sock)
        if self.quit_requested or not self.gpus:
            self.answer(sock, {"error": 807})
            return
        server = self._server_for(uid)
        if server is not None and server.ready:
            self._welcome(sock, pid, uid, server)
            return
        self.logbook.write(
            "Control", f"NEW CLIENT {pid} from user {uid}: Server is not ready, push client to pending list"
        )
        self._pending.append((sock, message))
        if not self.servers:
            self.start_server(uid)

    def _welcome(self, sock: socket.socket, pid: int, uid: int, server: ServerProcess) -> None:
        self.logbook.write("Control", f"NEW CLIENT {pid} from user {uid}: Server already exists")
        limits = [self.commands.limit(server, gpu) for gpu in self.gpus]
        self.answer(sock, {"server": server.pid, "node": self.directory, "limits": limits})

    def _server_for(self, uid: int) -> ServerProcess | None:
        usable = [s for s in self.servers.values() if not s.stopping]
        return next((s for s in usable if self.multiuser or s.uid == uid), None)

    def _serve_pending(self) -> None:
        for sock, _ in list(self._pending):
            pid, uid, _ = packets.peer(sock)
            server = self._server_for(uid)
            if server is not None and server.ready:
                self._pending = [(s, m) for s, m in self._pending if s is not sock]
                self._welcome(sock, pid, uid, server)
            elif server is None:
                self._make_room(uid)

    def _make_room(self, uid: int) -> None:
        """Stop the present server for the next user, once it has no clients."""
        if not self.servers:
            self.start_server(uid)
            return
        for server in self.servers.values():
            if server.ready and not server.stopping and not self.clients(server.pid):
                self.stop_server(server)

    def clients(self, pid: int) -> list[Message]:
        return list(self.ask_gpu({"op": "server_info", "server": pid}).get("clients", []))

    # -- servers ----------------------------------------------------------------------------------------

    def start_server(self, uid: int) -> ServerProcess:
        """Start a server process for a user."""
        ours, theirs = packets.pair()
        script = paths.launcher(self.directory, paths.SERVER_NAME)
        gpus = ",".join(str(g["index"]) for g in self.gpus)
        owner = 0 if self.multiuser else uid
        pid = os.fork()
        if pid == 0:
            log_fd = -1 if self.logbook.silent else self._server_log
            _become_server(script, theirs, log_fd, [str(owner), gpus, str(self.commands.percentage)])
        theirs.close()
        server = ServerProcess(pid, owner, ours)
        server.settings.update(self.commands.defaults_for_servers())
        self.servers[pid] = server
        self.logbook.write("Control", f"Starting new server {pid} for user {uid}", pid)
        self._watch(ours, lambda: self._server_says(server))
        self._watch(server.pidfd, lambda: self._server_ended(server))
        return server

    def _server_says(self, server: ServerProcess) -> None:
        try:
            message, _ = packets.receive(server.link)
        except BlockingIOError:
            return
        except packets.Gone:
            self._selector.unregister(server.link)
            return
        if message.get("ready"):
            server.ready = True
            self.logbook.write("Control", f"NEW SERVER {server.pid}: Ready")
            self._serve_pending()

    def _server_ended(self, server: ServerProcess) -> None:
        _, status = os.waitpid(server.pid, 0)
        self._selector.unregister(server.pidfd)
        if server.link.fileno() in self._selector.get_map():
            self._selector.unregister(server.link)
        server.link.close()
        os.close(server.pidfd)
        self.servers.pop(server.pid, None)
        if not server.ready:
            # The server could not start: do not let its clients wait forever.
            for client, _ in list(self._pending):
                self.answer(client, {"error": 805})
        code = os.waitstatus_to_exitcode(status)
        # Stock prints 0 for a server that was ended by a signal, too.
        self.logbook.write("Control", f"Server {server.pid} exited with status {max(code, 0)}")

    def stop_server(self, server: ServerProcess) -> None:
        """Tell a server to end now, even with clients."""
        server.stopping = True
        try:
            packets.send(server.link, {"stop": True})
        except (packets.Gone, BlockingIOError):
            return

    # -- the end ----------------------------------------------------------------------------------------

    def begin_quit(self, sock: socket.socket, timeout_s: float | None) -> None:
        """End once no client is left, or after `timeout_s` seconds. The front end waits."""
        self.quit_requested = True
        self._quitting.append(sock)
        if timeout_s is not None:
            self._deadline = time.monotonic() + timeout_s
            self.logbook.write("Control", f"quit command issued with timeout of {timeout_s:g}")
        for client, _ in list(self._pending):
            self.answer(client, {"error": 807})
        for server in self.servers.values():
            self.logbook.write("Control", f"Try shutting down server {server.pid}, backoff is disabled")
        self._progress_quit()

    def _progress_quit(self) -> None:
        forced = self._deadline is not None and time.monotonic() >= self._deadline
        for server in self.servers.values():
            if not server.stopping and (forced or not self.clients(server.pid)):
                self.stop_server(server)
        if not self.servers:
            self.logbook.write("Control", "Exit with status 0")
            self._running = False

    def _end(self) -> None:
        for server in self.servers.values():
            server.link.close()
            try:
                os.kill(server.pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        for server in self.servers.values():
            os.waitpid(server.pid, 0)
        for name in FILES:
            unlink(os.path.join(self.pipe_dir, name))
        for sock in list(self._quitting):
            self.answer(sock, "")


def unlink(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        return


def _become_server(script: str, link: socket.socket, log_fd: int, arguments: list[str]) -> None:
    """Run the server in the forked child, without a log if `log_fd` is negative. Never returns."""
    try:
        os.set_inheritable(link.fileno(), True)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null if log_fd < 0 else log_fd, 1)
        os.dup2(null, 2)
        os.execv(script, [script, str(link.fileno()), *arguments])
    finally:
        os._exit(127)
