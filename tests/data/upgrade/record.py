"""Record the fixtures of the upgrade tests from a real run of another revision. See README.md.

    OLD/.venv/bin/python tests/data/upgrade/record.py OLD FOLDER [names]

OLD is a checkout of that revision in which scripts/setup has run; the fixtures go to FOLDER. All code of
mpsd and of tests.support comes from OLD, but for the modules that the upgrade tests share. With `names`,
replace only the names in FOLDER/names.json that come from the source.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import types
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FENCED = 70
TRACE = ["strace", "-D", "-ff", "-ttt", "-xx", "-s", "262144"]
TRACE += ["-e", "trace=connect,sendmsg,recvmsg,sendto,recvfrom"]
_CALL = re.compile(r"(?P<at>[\d.]+) (?P<call>\w+)\((?P<fd>\d+), (?P<rest>.*)\) = (?P<result>-?\d+)")
_BYTES = re.compile(r'(?:iov_base=|^)"((?:\\x[0-9a-f]{2})*)"')
_PATH = re.compile(r'sun_path="((?:\\x[0-9a-f]{2})*)"')

_CLIENT = """
import mpsd_client
with mpsd_client.connect() as client:
    for op in ("status", "env", "holders", "faults", "failovers", "vault_list", "version"):
        client.call(op)
    client.explain("sm-trap")
    try:
        client.kill({no_client}, reason="an upgrade test")
    except mpsd_client.MpsdError as error:
        assert error.code == "not-found", error
    stream = client.subscribe(since_id=0)
    next(stream), next(stream)
"""

_VAULT = """
import fcntl, os, sys
from mpsd_client.vault import Piece, Vault
fd = os.memfd_create("mpsd-standin-vmm", os.MFD_ALLOW_SEALING)
os.ftruncate(fd, 4096)
fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
with Vault(sys.argv[1], {token!r}) as vault:
    assert vault.bring("brought", Piece(fd, 4096, 0x7f0000000000, bytes(16)), 3)
    assert vault.claim("brought") and vault.claim("nothing") is None
    vault.leave(3)
    assert vault.take("brought", 4)
    assert vault.release("brought")
"""


def load(name: str) -> types.ModuleType:
    """Import a module of tests/support of this tree. Its own imports come from OLD."""
    path = HERE.parents[1] / "support" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"upgrade_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Trace:
    """System calls of a traced process and its children, in order."""

    def __init__(self, prefix: Path) -> None:
        self.prefix = prefix

    def command(self, *command: str) -> list[str]:
        return [*TRACE, "-o", str(self.prefix), *command]

    def calls(self) -> list[tuple[str, str, bytes, int]]:
        """(path of the socket, "sent" or "heard", data, number of descriptors)."""
        lines = [
            match
            for path in self.prefix.parent.glob(f"{self.prefix.name}.*")
            for line in path.read_text().splitlines()
            if (match := _CALL.match(line))
        ]
        paths: dict[str, str] = {}
        found = []
        for line in sorted(lines, key=lambda match: float(match["at"])):
            rest, count = line["rest"], int(line["result"])
            where = _PATH.search(rest)
            if line["call"] == "connect" and where:
                paths[line["fd"]] = _raw(where[1]).decode()
            elif count >= 0 and line["call"] != "connect" and (data := _BYTES.search(rest)):
                path = _raw(where[1]).decode() if where else paths.get(line["fd"], "")
                rights = re.search(r"SCM_RIGHTS, cmsg_data=\[([^]]*)\]", rest)
                fds = len(rights[1].split(",")) if rights else 0
                way = "sent" if line["call"].startswith("send") else "heard"
                found.append((path, way, _raw(data[1])[:count], fds))
        return found

    def rows(self, socket_name: str) -> list[dict[str, Any]]:
        return [
            {way: data.hex(), **({"descriptors": fds} if fds else {})}
            for path, way, data, fds in self.calls()
            if path.endswith(f"/{socket_name}")
        ]


def _raw(text: str) -> bytes:
    return bytes.fromhex(text.replace("\\x", ""))


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.contextmanager
def traces() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="mpsd-trace-", dir="/tmp") as folder:
        yield Path(folder)


def record_scene(scenes: types.ModuleType, site_module: types.ModuleType, folder: Path) -> None:
    """Files, stored sets, the datagrams to the keeper, names, and an old client's bytes."""
    with traces() as where:
        daemon, client, vault = (Trace(where / name) for name in ("daemon", "client", "vault"))

        class Traced(site_module.Site):  # type: ignore[misc,name-defined]
            def command(self, *arguments: str) -> list[str]:
                made: list[str] = super().command(*arguments)
                return made if self.log.exists() and self.log.stat().st_size else daemon.command(*made)

        with Traced(**scenes.SETTINGS) as site:
            scene = scenes.Scene(site.start()).play()
            environ = {**site.environ(), "MPSD_SOCKET": site.socket}
            text = _CLIENT.format(no_client=scenes.NO_CLIENT)
            run(client.command(sys.executable, "-c", text), environ)
            text = _VAULT.format(token=scenes.TOKEN)
            run(vault.command(sys.executable, "-c", text, scene.vault_socket), environ)
            site.kill()
            for file in sorted(site.run_dir.glob("*.json")) + sorted(site.state_dir.glob("*")):
                if file.is_file() and file.name != ".mpsd.lock":
                    shutil.copyfile(file, folder / file.name)
            make_neutral(folder / "state.json")
            record_store(scenes.fetch(site.run_dir), folder / "store.jsonl")
            site.start()
            write_names(folder / "names.json", scenes.collect(scene))
        datagrams = [
            {"text": data.decode(), "descriptors": fds}
            for path, _, data, fds in daemon.calls()
            if path.endswith("/keeper.sock")
        ]
        write_rows(folder / "keeper.jsonl", datagrams)
        write_rows(folder / "client.jsonl", client.rows("mpsd.sock"))
        write_rows(folder / "vault.jsonl", vault.rows("vault.sock"))
    shutil.copyfile(site_module.ROOT / "mpsd" / "keeper.py", folder / "keeper.py.txt")


def make_neutral(path: Path) -> None:
    """Replace the machine's own names (interpreter, cgroup) in a state file, and its checksum."""
    head, body = path.read_text().splitlines()
    body = re.sub(r'"exe":"[^"]*"', '"exe":"/usr/bin/python3"', body)
    body = re.sub(r'"cgroup":"[^"]*"', '"cgroup":"/user.slice"', body)
    made = {**json.loads(head), "crc32": zlib.crc32(body.encode())}
    path.write_text(f"{json.dumps(made)}\n{body}\n")


def write_names(path: Path, names: Mapping[str, Sequence[str]]) -> None:
    """Write one part a line."""
    parts = [f"{json.dumps(part)}: {json.dumps(found)}" for part, found in names.items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def record_static_names(old: Path, path: Path) -> None:
    """Add the names that the source of OLD fixes, in place of those in the file."""
    static = load("upgradenames")
    shown = json.loads(path.read_text())
    kept = {part: names for part, names in shown.items() if not part.startswith(static.PREFIX)}
    write_names(path, {**kept, **static.static_names(old)})


def record_store(held: Mapping[str, int], path: Path) -> None:
    """The labels in a store, with the contents of memory files up to their last byte that is not zero."""
    rows = []
    for label, fd in held.items():
        row: dict[str, Any] = {"label": label}
        link = os.readlink(f"/proc/self/fd/{fd}")
        if link.startswith("/memfd:"):
            size = os.fstat(fd).st_size
            row |= {"file": link.removeprefix("/memfd:").removesuffix(" (deleted)"), "bytes": size}
            row["content"] = os.pread(fd, size, 0).rstrip(b"\0").hex()
        rows.append(row)
        os.close(fd)
    write_rows(path, rows)


def record_proxy(scenes: types.ModuleType, site_module: types.ModuleType, folder: Path) -> None:
    """Record the bytes between the proxy and the daemon through one fail-over."""
    from tests.support.libcudas import build_libraries

    with traces() as where:
        libraries = build_libraries(where)
        trace = Trace(where / "proxy")
        settings = {**scenes.SETTINGS, "failover__driver": f'"{libraries.real}"'}
        with site_module.Site(**settings) as site:
            site.start()
            script, prefix = HERE / "proxied.py", trace.command()
            with scenes.Proxied(site, site_module.ROOT, where, script, *prefix) as program:
                program.fail_over()
                # The last message of a fail-over comes when the old domain has ended.
                site_module.until(lambda: FENCED in kinds_heard(trace), "the program is told of its fence")
                site_module.until(lambda: is_answered(trace), "the vault has answered")
        write_rows(folder / "proxy-vault.jsonl", trace.rows("vault.sock"))
        write_rows(folder / "proxy-failover.jsonl", trace.rows("failover.sock"))


def kinds_heard(trace: Trace) -> list[int]:
    """The kinds of message that the proxy has received on failover.sock."""
    rows = trace.rows("failover.sock")
    return [int.from_bytes(bytes.fromhex(row["heard"])[6:8], sys.byteorder) for row in rows if "heard" in row]


def is_answered(trace: Trace) -> bool:
    """Whether every message to the vault, the release of memory among them, has its answer."""
    rows = trace.rows("vault.sock")
    return len(rows) > 8 and len(rows) == 2 * sum("sent" in row for row in rows)


def record_manager(scenes: types.ModuleType, site_module: types.ModuleType, folder: Path) -> None:
    """Record the labels that the daemon keeps in the descriptor store of a service manager."""
    manager_module = importlib.import_module("tests.support.manager")
    with (
        site_module.Site(**scenes.SETTINGS) as site,
        manager_module.Manager(site.base, store_max=512) as manager,
    ):
        manager.start(site.command(), site.environ())
        manager.wait_for("READY", "1")
        scene = scenes.Scene(site)
        scene.until_ready(scene.participant())
        scene.keep_memory()
        manager.kill()
        record_store({label: os.dup(fd) for label, fd in manager.stored}, folder / "systemd.jsonl")


def run(command: Sequence[str], environ: Mapping[str, str]) -> None:
    subprocess.run(command, env=dict(environ), cwd="/", check=True, timeout=60)


def main(old: str, folder: str, only: str = "") -> None:
    sys.dont_write_bytecode = True
    sys.path[:0] = [old, f"{old}/clients", f"{old}/clients/libcuda"]
    site_module = importlib.import_module("tests.support.site")
    assert str(site_module.ROOT) == str(Path(old).resolve()), site_module.ROOT
    scenes = load("upgradescene")
    target = Path(folder).resolve()
    assert only in ("", "names"), only
    if not only:
        record_scene(scenes, site_module, target)
    record_static_names(Path(old).resolve(), target / "names.json")
    if not only:
        record_manager(scenes, site_module, target)
        record_proxy(scenes, site_module, target)


if __name__ == "__main__":
    main(*sys.argv[1:])
