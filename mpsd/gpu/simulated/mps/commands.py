"""The v2 text commands, with the answers of the stock control daemon of release 580."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from mpsd.gpu.simulated.mps.controldaemon import Daemon, ServerProcess
    from mpsd.gpu.simulated.packets import Message

_UNITS = {"G": 1 << 30, "M": 1 << 20}
_INVALID_CONTEXT = 201
_MODES = {"default": "Default", "exclusive-process": "Exclusive Process", "prohibited": "Prohibited"}


class Commands:
    """Settings of the daemon, and one method for each command."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self.percentage = 100.0
        self._priority = "0"
        self._limits: dict[str, str] = {}

    def defaults_for_servers(self) -> dict[str, str]:
        limits = {f"limit {device}": value for device, value in self._limits.items()}
        return {"percentage": str(self.percentage), **limits}

    def knows(self, text: str) -> bool:
        """Return whether this is one line with a command that the stock daemon has."""
        words = text.split()
        return bool(words) and len(text.splitlines()) == 1 and hasattr(self, f"_do_{words[0]}")

    @staticmethod
    def unknown(text: str) -> str:
        """Return the reply to any other command."""
        return f'Unknown command "{next(iter(text.split()), "")}"'

    def run(self, text: str, sock: socket.socket) -> str | None:
        """Return the reply to a known command, or None if it comes later through Daemon.reply."""
        name, *arguments = text.split()
        method: Callable[..., str | None] = getattr(self, f"_do_{name}")
        try:
            return method(sock, *arguments)
        except (TypeError, ValueError):
            return f"Invalid arguments for {name}"

    def limit(self, server: ServerProcess, gpu: Message) -> int | None:
        """Return the limit [bytes] of each client of a server on a GPU. The last value set wins."""
        ordinal = str(self._daemon.gpus.index(gpu))
        names = {f"limit {ordinal}", f"limit {gpu['uuid']}"}
        found = [value for name, value in server.settings.items() if name in names]
        return _bytes(found[-1]) if found else None

    # -- queries -----------------------------------------------------------------------------------------

    def _do_get_server_list(self, _sock: socket.socket) -> str:
        return "\n".join(str(pid) for pid in self._daemon.servers)

    def _do_get_server_status(self, _sock: socket.socket, server: str) -> str:
        process = self._daemon.servers.get(int(server))
        if process is None:
            return f"Server {server} not found"
        if not process.ready:
            return "INITIALIZING"
        status = self._daemon.ask_gpu({"op": "server_info", "server": process.pid}).get("status")
        return str(status) if status else f"Server {server} not found"

    def _do_get_client_list(self, _sock: socket.socket, server: str) -> str:
        if int(server) not in self._daemon.servers:
            return f"Server {server} not found"
        pids = dict.fromkeys(c["pid"] for c in self._daemon.clients(int(server)))
        return "\n".join(str(pid) for pid in pids)

    def _do_get_device_client_list(self, _sock: socket.socket, server: str = "") -> str:
        pids = [int(server)] if server else list(self._daemon.servers)
        lines = []
        for pid in pids:
            for ordinal, gpu in enumerate(self._daemon.gpus):
                lines.append(f"[{ordinal}] {gpu['pci'].partition(':')[2]}, {gpu['name']}")
                lines += [f"{c['pid']}.1" for c in self._daemon.clients(pid) if c["uuid"] == gpu["uuid"]]
        return "\n".join(lines) if pids else "Server not found"

    def _do_device_query(self, _sock: socket.socket, *_options: str) -> str:
        head = f"{'Device Ordinal':16}{'PCI IDs':15}{'UUID':42}{'Name':34}Attributes"
        rows = [
            f"{n:<16}{g['pci']:15}{g['uuid']:42}{g['name']:34}N/A" for n, g in enumerate(self._daemon.gpus)
        ]
        blocks = ["\n".join(["Default", head, *rows])]
        blocks += ["\n".join([f"Server {pid}", head, *rows]) for pid in self._daemon.servers]
        return "\n\n".join(blocks)

    def _do_ps(self, _sock: socket.socket, option: str = "", server: str = "") -> str:
        pids = [int(server)] if option == "-p" else list(self._daemon.servers)
        if not pids or any(pid not in self._daemon.servers for pid in pids):
            return "Server not found"
        rows = [(pid, client) for pid in pids for client in self._daemon.clients(pid)]
        if not rows:
            return ""
        head = f"{'PID':10}{'ID':10}{'SERVER':15}{'DEVICE':26}{'NAMESPACE':15}{'COMMAND':15}"
        return "\n".join([head, *(_process_row(pid, client) for pid, client in rows)])

    # -- clients and servers ----------------------------------------------------------------------------

    def _do_start_server(self, _sock: socket.socket, option: str, uid: str) -> str:
        if option != "-uid" or (int(uid) != os.getuid() and os.getuid() != 0):
            raise ValueError(option)
        if not self._daemon.servers:
            self._daemon.start_server(int(uid))
        return ""

    def _do_shutdown_server(self, sock: socket.socket, server: str, force: str = "") -> str | None:
        process = self._daemon.servers.get(int(server))
        if process is None:
            return f"Server {server} not found"
        if force != "-f" and self._daemon.clients(process.pid):
            return f"Server {server} has clients"
        self._daemon.stop_server(process)
        return ""

    def _do_terminate_client(self, sock: socket.socket, server: str, client: str) -> str | None:
        if int(server) not in self._daemon.servers:
            return f"Server {server} not found\nServer {server} not found!\n1"
        if not os.path.exists(f"/proc/{int(client)}"):
            return f"Invalid process {client}!\n1"

        def done(answer: Message) -> None:
            result = answer.get("result")
            self._daemon.reply(sock, str(_INVALID_CONTEXT if result is None else result))

        self._daemon.ask_gpu_later({"op": "terminate", "server": int(server), "pid": int(client)}, done)
        return None

    def _do_quit(self, sock: socket.socket, option: str = "", timeout: str = "") -> None:
        if option not in ("", "-t"):
            raise ValueError(option)
        self._daemon.begin_quit(sock, float(timeout) if option else None)

    # -- settings ---------------------------------------------------------------------------------------

    def _do_get_default_active_thread_percentage(self, _sock: socket.socket) -> str:
        return f"{self.percentage:.1f}"

    def _do_set_default_active_thread_percentage(self, _sock: socket.socket, value: str) -> str:
        self.percentage = _percentage(value)
        return f"{self.percentage:.1f}"

    def _do_get_active_thread_percentage(self, _sock: socket.socket, server: str) -> str:
        return f"{float(self._server(server).settings['percentage']):.1f}"

    def _do_set_active_thread_percentage(self, _sock: socket.socket, server: str, value: str) -> str:
        self._server(server).settings["percentage"] = str(_percentage(value))
        return f"{_percentage(value):.1f}"

    def _do_get_default_device_pinned_mem_limit(self, _sock: socket.socket, device: str) -> str:
        return self._limits.get(device, "")

    def _do_set_default_device_pinned_mem_limit(self, _sock: socket.socket, device: str, value: str) -> str:
        _bytes(value)
        # Stock logs the command once more, with a full stop.
        self._daemon.logbook.write("Control", f"set_default_device_pinned_mem_limit {device} {value}.")
        if not self._is_device(device):
            return f"Invalid device identifier format: {device}"
        # A value that is set again moves to the end.
        self._limits.pop(device, None)
        self._limits[device] = value
        return ""

    def _do_get_device_pinned_mem_limit(self, _sock: socket.socket, server: str, device: str) -> str:
        return self._server(server).settings.get(f"limit {device}", "")

    def _do_set_device_pinned_mem_limit(
        self, _sock: socket.socket, server: str, device: str, value: str
    ) -> str:
        limit = _bytes(value)
        settings = self._server(server).settings
        if not self._is_device(device):
            return f"Invalid device identifier format: {device}"
        said = f"Device pinned memory limit for device {device} set to {limit:#x} bytes"
        self._daemon.logbook.write("Server", said, int(server))
        settings.pop(f"limit {device}", None)
        settings[f"limit {device}"] = value
        return ""

    def _do_get_default_client_priority(self, _sock: socket.socket) -> str:
        return self._priority

    def _do_set_default_client_priority(self, _sock: socket.socket, value: str) -> str:
        if value not in ("0", "1"):
            raise ValueError(value)
        self._priority = value
        # Clients that connect later get it, those of running servers too.
        for server in self._daemon.servers:
            self._daemon.logbook.write("Server", f"Client Priority set to {value}", server)
        return ""

    def _is_device(self, name: str) -> bool:
        """Return whether a name is an ordinal of this daemon or has the form of a UUID."""
        return name.startswith("GPU-") or name in {str(n) for n in range(len(self._daemon.gpus))}

    def _server(self, pid: str) -> ServerProcess:
        found = self._daemon.servers.get(int(pid))
        if found is None:
            raise ValueError(pid)
        return found


def _process_row(server: int, client: Message) -> str:
    try:
        namespace = str(os.stat(f"/proc/{client['pid']}/ns/pid").st_ino)
    except OSError:
        namespace = "-"
    uuid = client["uuid"][:22]
    return f"{client['pid']:<10}{client['context']:<10}{server:<15}{uuid:26}{namespace:15}{client['command']}"


def _percentage(text: str) -> float:
    value = float(text)
    if not 0 < value <= 100:
        raise ValueError(text)
    return value


def _bytes(text: str) -> int:
    """Convert `2G` or `512M` to bytes. Raises ValueError."""
    unit = _UNITS.get(text[-1:].upper())
    if unit is None:
        raise ValueError(text)
    return int(text[:-1]) * unit
