"""One busy daemon on the simulated GPU, and the names of everything it shows.

record.py of tests/data/upgrade runs this at revision 50d9fcb, and the upgrade tests run it at the present
one. Both therefore import only tests.support and mpsd_client, which exist at both revisions.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import mpsd_client
from tests.support.site import DEADLINE_S, ROOT, Program, Site, until

SETTINGS = {
    "vault__enabled": "true",
    "failover__enabled": "true",
    "failover__driver": '"/bin/true"',
    # An earlier version has no such key.
    "domains__start": "",
}
SETTING = "set_default_active_thread_percentage 40"
TOKEN = b"the secret of an upgrade test".ljust(32, b"\0")
MIB = 1 << 20
NO_CLIENT = 2
"""A pid that is no client of any domain."""

_KEEPER = """
import signal, sys
sys.path.insert(0, {root!r})
from tests.support.vaulting import VaultClient
client = VaultClient({path!r}, token={token!r})
assert client.keep_alone("weights", 7, b"seven").count == 1
assert client.keep_alone("moments", 8, b"eight", size=8192).count == 1
client.put(9, 4096, b"nine")
print("there", flush=True)
signal.pause()
"""


class Scene:
    """The history of a site, ended with the site."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.vault_socket = str(site.run_dir / "vault.sock")
        self.failover_socket = str(site.run_dir / "failover.sock")
        self.answers: dict[str, Any] = {}

    def play(self) -> Scene:
        """Make faults, a fail-over, kept memory, a setting by hand, and a lease of an exited client."""
        self.participants = [self.participant() for _ in range(2)]
        self.until_ready(*self.participants)
        self.evicted_by_guard()
        self.keep_memory()
        offender = self.site.join()
        offender.fault()
        for program in self.participants:
            said(program, "fo.move()")
        self.site.until_fault("mmu-invalid-address")
        self.until_outcomes(1, "moved")
        offender.die()
        self.lingering = self.site.join()
        self.living, self.zoned = self.site.join(), self.guarded()[0]
        environ = {**self.site.client_environ(), "MPSD_SIM_DIR": str(self.site.node_dir)}
        del environ["CUDA_MPS_PIPE_DIRECTORY"]
        self.stranger = self.site.program(environ=environ)
        self.site.ask(lambda c: c.zone_policy(self.zoned.pid, "absorb"))
        self.set_by_hand()
        self.lingering.do("dev.launch('forever')")
        self.lingering.die()
        self.site.until(self._settled, "the scene has settled")
        return self

    def _settled(self, status: Mapping[str, Any]) -> bool:
        row = next((c for c in status["clients"] if c["pid"] == self.living.pid), None)
        guarded = row is not None and any(text.startswith("guard") for text in row["protections"])
        states = [d["state"] for d in status["domains"]]
        guarded = guarded and bool(status["gpus"][0]["not_on_mps"])
        return guarded and len(status["dead"]) == 1 and {"active", "warm"} <= set(states)

    def participant(self) -> Program:
        program = self.site.join()
        assert said(program, f"failover({self.failover_socket!r})")[0] == "WELCOME"
        assert said(program, "fo.prepare()")[0] == "STANDBY"
        return program

    def until_ready(self, *programs: Program) -> None:
        wanted = {p.pid for p in programs}

        def ready(status: Mapping[str, Any]) -> bool:
            rows = [p for s in status["slots"] for p in s["programs"]]
            return wanted <= {p["pid"] for p in rows if p["standing"] == "ready"}

        self.site.until(ready, "the participants are ready")

    def until_outcomes(self, number: int, outcome: str) -> None:
        def look() -> bool:
            records = self.site.ask(lambda c: c.failovers())
            rows = [c for r in records if r["id"] == number for c in r["clients"]]
            return sum(c["outcome"] == outcome for c in rows) == 2

        until(look, f"two participants {outcome}")

    def guarded(self) -> tuple[Program, int]:
        """Start a client with a guard zone behind an allocation of 1 MiB. Return the address."""
        client = self.site.join()
        assert said(client, f"guard({self.vault_socket!r})") > 0
        return client, int(said(client, f"zoned.alloc({MIB // 4})"))

    def evicted_by_guard(self) -> None:
        client, address = self.guarded()
        client.order(f"zoned.launch('store', {address + MIB + 64})")
        client.wait()

        def look() -> bool:
            hits = [f["hit"] for f in self.site.faults() if f["class"] == "guard-hit"]
            return any(hit["outcome"] == "evicted" and hit["allocation"] for hit in hits)

        until(look, "the guard hit is recorded")

    def keep_memory(self) -> None:
        """Make two named segments of a client that has exited."""
        text = _KEEPER.format(root=str(ROOT), path=self.vault_socket, token=TOKEN)
        process = subprocess.Popen(
            [sys.executable, "-c", text], stdout=subprocess.PIPE, text=True, env=self.site.environ(), cwd="/"
        )
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)

        def kept() -> bool:
            rows = self.site.ask(lambda c: c.vault_list())
            return sorted(str(r["name"]) for r in rows if r["died_s"] is not None) == ["moments", "weights"]

        until(kept, "the vault keeps two segments")

    def set_by_hand(self) -> None:
        active = next(d for d in self.site.status()["domains"] if d["role"] == "active")
        self.site.control(active["id"], SETTING)
        self.site.until(has_setting, "the setting is kept")

    def ask_all(self) -> dict[str, Any]:
        """Return the answer to every query that changes nothing."""
        site, found = self.site, self.answers
        found["status"] = site.status()
        for name in ("holders", "faults", "failovers", "doctor", "vault_list", "version"):
            found[name] = site.ask(lambda c, name=name: c.call(name))
        found["explain"] = site.ask(lambda c: c.call("explain", {"class": "sm-trap"}))
        found["env"] = site.ask(lambda c: c.call("env"))
        found["kill"] = site.ask(lambda c: c.call("kill", {"pid": self.living.pid, "dry_run": True}))
        found["drain"] = site.ask(lambda c: c.call("drain", {"dry_run": True}))
        found["vault_free"] = site.ask(lambda c: c.call("vault_free", {"what": "weights", "dry_run": True}))
        return found

    def events(self) -> list[Mapping[str, Any]]:
        """Return all kept events."""

        def read(client: mpsd_client.Client) -> list[Mapping[str, Any]]:
            stream = client.subscribe(since_id=0)
            return [next(stream) for _ in range(stream.kept)]

        return self.site.ask(read)


class Proxied:
    """A context: tests/data/upgrade/proxied.py under mpsd-run of one tree, behind the proxy of that tree.

    `libraries`: a folder with `proxy` and `standin`; `prefix`: a command that runs the program.
    """

    def __init__(self, site: Site, root: Path, libraries: Path, script: Path, *prefix: str) -> None:
        environ = {
            **{name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ},
            "PYTHONPATH": f"{root}:{root / 'clients'}:{sysconfig.get_path('purelib')}",
            "LD_LIBRARY_PATH": str(libraries / "standin"),
            "MPSD_SOCKET": site.socket,
            "MPSD_LIBCUDA_DIR": str(libraries / "proxy"),
            "MPSD_STANDIN_GPU": "simulated",
            "MPSD_FAILOVER": "exact",
            "MPSD_TEST_BASE": str(site.base),
        }
        command = [*prefix, sys.executable, "-m", "mpsd_client.run", sys.executable, str(script)]
        pipe = subprocess.PIPE
        # Not in a checkout: `python -m` imports from the working directory first.
        self.process = subprocess.Popen(command, env=environ, cwd="/", stdin=pipe, stdout=pipe, text=True)
        self._site = site

    @property
    def pid(self) -> int:
        return self.process.pid

    def hear(self) -> str:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        assert ready, "the proxied program said nothing in time"
        return self.process.stdout.readline().strip()

    def do(self, expression: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(expression + "\n")
        self.process.stdin.flush()
        return self.hear()

    def fail_over(self) -> Mapping[str, Any]:
        """Allocate, become a ready participant, survive a neighbour's fault. Return the fail-over record."""
        assert self.hear() == "[0, 0, 0, 0, 0]"
        address = self.do("alloc(1 << 20)")
        assert self.do(f"write({address}, 7) or sync()") == "0"

        def ready(status: Mapping[str, Any]) -> list[Any]:
            rows = [p for slot in status["slots"] for p in slot["programs"]]
            return [p for p in rows if (p["pid"], p["standing"]) == (self.pid, "ready")]

        self._site.until(ready, "the proxied program is ready")
        neighbour = self._site.join()
        neighbour.fault("trap")

        def moved() -> Mapping[str, Any] | None:
            records = self._site.ask(lambda c: c.failovers())
            wanted = (self.pid, "moved")
            return next(
                (r for r in records if wanted in {(c["pid"], c["outcome"]) for c in r["clients"]}), None
            )

        record = until(moved, "the proxied program has moved")
        assert record is not None
        # The old domain ends once it is empty.
        neighbour.die()
        assert self.do(f"free({address}) or sync()") == "0"
        return record

    def __enter__(self) -> Proxied:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
        assert kind is not None or self.process.returncode == 0


def has_setting(status: Mapping[str, Any]) -> bool:
    """Return whether the setting made by hand is in force; the text may name its user."""
    name, _, value = SETTING.removeprefix("set_default_").partition(" ")
    return any(t.startswith(name) and t.endswith(f" {value}") for t in status["gpus"][0]["limits"])


def said(program: Program, expression: str) -> Any:
    answer = program.do(expression)
    assert "result" in answer, answer
    return answer["result"]


# -- names ----------------------------------------------------------------------------------------------


def key_paths(value: object, at: str = "") -> Iterator[str]:
    """Return every key of nested JSON: `clients[].pid` is the key `pid` of the rows of `clients`."""
    if isinstance(value, Mapping):
        for key, below in value.items():
            yield f"{at}.{key}" if at else str(key)
            yield from key_paths(below, f"{at}.{key}" if at else str(key))
    elif isinstance(value, list | tuple):
        for row in value:
            yield from key_paths(row, f"{at}[]")


def keys_of(value: object) -> list[str]:
    return sorted(set(key_paths(value)))


def _all_keys(site: Site) -> tuple[str, ...]:
    """Return the option of `config show` for all keys; the recorded revision printed all without it."""
    return ("--all",) if "--all" in command(site, "mpsd", "config", "show", "--help") else ()


def config_keys(text: str) -> list[str]:
    """Return dotted keys of what `mpsd config show` prints, unset ones included."""
    lines = (
        line.removeprefix("# ").replace(" is not set", " = 0") if line.endswith(" is not set") else line
        for line in text.splitlines()
    )
    return sorted(path for path in key_paths(tomllib.loads("\n".join(lines))) if path.count(".") < 2)


def command(site: Site, name: str, *arguments: str) -> str:
    """Return the output of a console script of this environment. Its status may say that mpsd is degraded."""
    script = Path(sysconfig.get_path("scripts")) / name
    done = subprocess.run(
        [str(script), *arguments],
        env={**site.environ(), "NO_COLOR": "1", "MPSD_SOCKET": site.socket},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode in (0, 10, 11), done.stderr
    return done.stdout


def metrics(text: str) -> list[str]:
    """Return `name{label}` of each line of a Prometheus exposition."""
    found = set()
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, rest = line.partition("{")
            labels = [part.partition("=")[0] for part in rest.rpartition("}")[0].split(",") if part]
            found.add(f"{name}{{{','.join(labels)}}}" if labels else line.split()[0])
    return sorted(found)


def operations() -> list[str]:
    """Return the operations of the wire with the right that each takes, and one line for each argument."""
    from mpsd.wire import messages

    found = []
    for name, row in messages.OPERATIONS.items():
        found.append(f"{name}: {row.right.value}, {'changes' if row.mutates else 'reads'}")
        for a in row.arguments:
            need = "required" if a.required else "optional"
            found.append(f"{name}({a.name}): {a.kind.name}, {need}, {a.low} to {a.high}")
    return sorted(found)


def collect(scene: Scene) -> dict[str, list[str]]:
    """Return every name that this scene shows and that other programs may rely on. See upgradenames too."""
    site = scene.site
    events = scene.events()
    by_kind: dict[str, set[str]] = {}
    for event in events:
        by_kind.setdefault(event["kind"], set()).update(event)
    fields = {kind: sorted(keys) for kind, keys in by_kind.items() if kind not in ("fault", "failover")}
    found = {f"answer {name}": keys_of(answer) for name, answer in sorted(scene.ask_all().items())}
    found |= {f"event {kind}": keys for kind, keys in sorted(fields.items())}
    found |= {
        "metrics": metrics(command(site, "mpsd-exporter")),
        "configuration": config_keys(command(site, "mpsd", "config", "show", *_all_keys(site))),
        "operations": operations(),
    }
    # At the end, since it removes the state file.
    return {**found, "orphan rows": keys_of(orphan_rows(scene))}


def orphan_rows(scene: Scene) -> list[Mapping[str, Any]]:
    """Return rows of exited clients in a domain that a daemon without a state file does not supervise."""
    scene.site.kill()
    (scene.site.run_dir / "state.json").unlink()
    scene.site.start()
    return list(scene.site.until(lambda s: s["dead"], "the orphan lease is held")["dead"])


# -- the keeper -------------------------------------------------------------------------------------------


def fetch(run_dir: Path) -> dict[str, int]:
    """Return duplicates of all descriptors in the keeper of this directory, by label.

    The caller closes them.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        ours.settimeout(DEADLINE_S)
        sender.settimeout(DEADLINE_S)
        sender.connect(str(run_dir / "keeper.sock"))
        socket.send_fds(sender, [b"FETCH=1"], [theirs.fileno()])
        found: dict[str, int] = {}
        while True:
            data, fds, _, _ = socket.recv_fds(ours, 1 << 16, 253)
            key, _, value = data.decode().partition("=")
            if key != "NAMES":
                assert key == "END", data
                return found
            found |= dict(zip(value.split(":"), fds, strict=True))
