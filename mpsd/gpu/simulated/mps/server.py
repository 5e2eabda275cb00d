"""Stand-in for nvidia-cuda-mps-server: a thin process that represents the server.

The contexts exist in the GPU process, where this process is their server. It writes the stock log lines. It
ends on request, with its control daemon (as stock does), or with the GPU.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket

from mpsd.gpu.simulated import packets, paths
from mpsd.gpu.simulated.mps.control import BINARY_VERSION
from mpsd.gpu.simulated.mps.logbook import Logbook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

    from mpsd.gpu.simulated.packets import Message


class Server:
    """A connection to the GPU process and to the control daemon. `clients`: contexts of each client."""

    def __init__(self, control: socket.socket, gpu: socket.socket, uid: int, gpus: list[int]) -> None:
        self._control, self._gpu = control, gpu
        self._logbook = Logbook(1)
        self._uid = uid
        answer, _ = packets.call(gpu, {"op": "node"})
        self._gpus: dict[int, Message] = {g["index"]: g for g in answer["gpus"] if g["index"] in gpus}
        self._numbers: dict[int, int] = {}
        self._contexts: dict[int, list[int]] = {}

    def start(self, percentage: str) -> None:
        logbook = self._logbook
        logbook.write("Other", "Startup")
        pipe_dir = paths.pipe_directory(os.environ)
        logbook.write("Other", f"Connecting to control daemon on socket: {os.path.join(pipe_dir, 'control')}")
        logbook.write("Other", "Initializing server process")
        answer, _ = packets.call(self._gpu, {"op": "server", "uid": self._uid, "gpus": list(self._gpus)})
        if answer.get("error"):
            raise packets.Gone(f"CUDA error {answer['error']}")
        for gpu in self._gpus.values():
            self._say(f"Creating server context on device {gpu['index']} ({gpu['name']})")
        self._say(f"Created anonymous shared memory region mps.shm.{self._uid}.{os.getpid()}")
        self._say(f"CUDA MPS Server (simulated). Binary version: {BINARY_VERSION}")
        self._say("Display Driver version: 580")
        packets.send(self._control, {"ready": True})
        self._say(
            f"Active Threads Percentage set to {percentage}\nServer Priority set to 0\nServer has started"
        )

    def run(self) -> int:
        with selectors.DefaultSelector() as selector:
            for sock in (self._control, self._gpu):
                sock.setblocking(False)
                selector.register(sock, selectors.EVENT_READ, sock)
            while True:
                for key, _ in selector.select():
                    if not self._readable(key.data):
                        return 0

    def _readable(self, sock: socket.socket) -> bool:
        """Handle a message. Return False when it is time to end."""
        try:
            message, _ = packets.receive(sock)
        except BlockingIOError:
            return True
        except packets.Gone:
            return False
        if message.get("silent"):
            self._logbook.silent = True
            return True
        if sock is self._control:
            self._say("Server has been notified to shutdown\nWaiting for current clients to finish\nExiting")
            return False
        self._notice(message)
        return True

    def _notice(self, notice: Message) -> None:
        match notice.get("event"):
            case "client":
                self._client_in(notice)
            case "exit":
                self._client_out(notice)
            case "refused":
                name = f"{{PID: {notice['pid']}, Context ID: 0}}"
                self._say(f"Server teardown in progress. Refusing to accept new client {name}")
                self._say(f"Failed to accept client {name} with status 807")
            case "no place":
                most = notice["most"]
                self._say(f"Failed to accept new client. Maximum number of clients ({most}) reached.")
                self._say(f"Client process {notice['pid']} disconnected")
            case "fault":
                self._fault(notice)
            case "recovered":
                for index in notice["units"]:
                    self._say(f"Destroy server context on device {index} ({self._gpus[index]['name']})")
                    self._say(f"Creating server context on device {index} ({self._gpus[index]['name']})")
            case "terminating":
                self._say(f"MPS server requesting client {self._named(notice)} to exit")
            case "terminated":
                self._say("Client termination succeeded.")
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)

    def _client_in(self, notice: Message) -> None:
        pid, gpu = notice["pid"], self._gpus[notice["unit"]]
        contexts = self._contexts.setdefault(pid, [])
        number = self._numbers[notice["context"]] = (contexts[-1] if contexts else 0) + 1
        contexts.append(number)
        for context in (0, number) if number == 1 else (number,):
            name = f"{{PID: {pid}, Context ID: {context}}}"
            self._say(f"Received new client request for {name}")
            self._say(f"Client {name} connected\nCreating worker thread for client {name}")
        self._say(f"Device {gpu['name']} (uuid {gpu['uuid']}) is associated")
        self._say(f"Status of client {self._named(notice)} is ACTIVE")

    def _client_out(self, notice: Message) -> None:
        # A clean exit looks like a death: the connection is lost, with status 806.
        pid, name = notice["pid"], self._named(notice)
        self._lost(name)
        self._say(f"Client {name} exiting. Number of active client contexts is {notice['left']}.")
        number = self._numbers.pop(notice["context"], 1)
        remaining = [n for n in self._contexts.get(pid, []) if n != number]
        if remaining:
            self._contexts[pid] = remaining
            return
        self._contexts.pop(pid, None)
        self._lost(f"{{PID: {pid}, Context ID: 0}}")
        self._say(f"Client process {pid} disconnected")

    def _lost(self, name: str) -> None:
        self._say(f"Server failed to recevie command with status 806, assuming client {name} exit")

    def _fault(self, notice: Message) -> None:
        clients: list[Message] = notice["clients"]
        if notice["blamed"] is not None:
            self._say(f"Client {{PID: {notice['blamed']}, Context: 1}} encountered a fatal GPU error.")
        self._say("Server is handling a fatal GPU error.")
        for client in clients:
            self._say(f"Client {self._named(client)} on device {client['unit']} to be torn down")
        for client in clients:
            self._say(f"All clients belonging to error trigging process {client['pid']} will be torn down")
            self._say(
                f"Client {self._named(client)} on the error-trigging process {client['pid']} to be torn down"
            )
        self._say("\n".join(["The following devices will be reset:", *map(str, notice["units"])]))
        pids = dict.fromkeys(str(client["pid"]) for client in clients)
        self._say("\n".join(["The following client process have a sticky error set:", *pids]))

    def _named(self, notice: Message) -> str:
        return f"{{PID: {notice['pid']}, Context ID: {self._numbers.get(notice['context'], 1)}}}"

    def _say(self, text: str) -> None:
        self._logbook.write("Server", text)


def _become(uid: int) -> None:
    """Switch to the served user. Only here, because the interpreter may be inaccessible to that user."""
    if uid != os.getuid():
        os.setgroups([])
        os.setgid(uid)
        os.setuid(uid)


def main(directory: str, arguments: Sequence[str]) -> int:
    """Run the server. arguments: descriptor of the link to the control daemon, uid, GPU indices,
    percentage."""
    link = socket.socket(fileno=int(arguments[0]))
    os.set_inheritable(link.fileno(), False)
    _become(int(arguments[1]))
    try:
        gpu = packets.connect(paths.gpu_socket(directory))
        server = Server(link, gpu, int(arguments[1]), [int(index) for index in arguments[2].split(",")])
        server.start(arguments[3])
        return server.run()
    except packets.Gone as error:
        Logbook(1).write("Server", f"Failed to start : {error}")
        return 1
