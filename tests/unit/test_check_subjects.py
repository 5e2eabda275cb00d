"""scripts/check-subjects on small repositories: with the base, without it, shallow, and with no git."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "check-subjects"
OLD = "2026-11-29T06:00:00Z"
NEW = "2026-11-29T12:00:00Z"
LIMIT = 72
FITS = "µ" * LIMIT
LONG = "x" * (LIMIT + 1)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")


def run(*command: str | Path, at: str = NEW) -> subprocess.CompletedProcess[str]:
    dates = {"GIT_AUTHOR_DATE": at, "GIT_COMMITTER_DATE": at}
    names = {f"GIT_{role}_{key}": "t@t" for role in ("AUTHOR", "COMMITTER") for key in ("NAME", "EMAIL")}
    outer = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    no_settings = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    return subprocess.run(
        command, env=outer | dates | names | no_settings, capture_output=True, text=True, timeout=30
    )


class Repository:
    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "scripts").mkdir(parents=True, exist_ok=True)
        shutil.copy2(SCRIPT, path / "scripts")

    def git(self, *command: str, at: str = NEW) -> str:
        done = run("git", "-C", self.path, *command, at=at)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, subject: str, at: str = NEW) -> str:
        self.git("commit", "--allow-empty", "-m", f"{subject}\n\n{'a body ' * 20}", at=at)
        return self.git("rev-parse", "HEAD")

    def check(self, *base: str) -> subprocess.CompletedProcess[str]:
        return run(self.path / "scripts" / SCRIPT.name, *base)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path / "origin")
    made.git("init", "--quiet", "--initial-branch=main")
    return made


def shallow(repository: Repository, path: Path) -> Repository:
    done = run("git", "clone", "--quiet", "--depth=1", f"file://{repository.path}", path)
    assert done.returncode == 0, done.stderr
    return Repository(path)


def test_only_commits_after_the_base_are_checked(repository: Repository) -> None:
    base = repository.commit(LONG)
    repository.commit(FITS)
    assert repository.check(base).returncode == 0
    repository.commit(LONG)
    refused = repository.check(base)
    assert refused.returncode == 1
    assert refused.stdout.splitlines() == [
        f"subject over {LIMIT} characters: {repository.git('rev-parse', '--short', 'HEAD')} {LONG}"
    ]


def test_a_history_without_the_base_is_checked_by_date(repository: Repository) -> None:
    repository.commit(LONG, at=OLD)
    repository.commit(FITS)
    assert repository.check().returncode == 0
    repository.commit(LONG)
    assert repository.check().returncode == 1


def test_a_shallow_clone_is_checked_by_date(repository: Repository, tmp_path: Path) -> None:
    base = repository.commit(LONG, at=OLD)
    repository.commit(LONG, at=OLD)
    assert shallow(repository, tmp_path / "old").check(base).returncode == 0
    repository.commit(LONG)
    assert shallow(repository, tmp_path / "new").check(base).returncode == 1


def test_merges_are_exempt_at_the_edge_of_a_shallow_clone_too(repository: Repository, tmp_path: Path) -> None:
    base = repository.commit("Start", at=OLD)
    repository.git("checkout", "--quiet", "-b", "side")
    repository.commit("Change something")
    repository.git("checkout", "--quiet", "main")
    repository.git("merge", "--quiet", "--no-ff", "-m", LONG, "side")
    assert repository.check(base).returncode == 0
    assert shallow(repository, tmp_path / "shallow").check(base).returncode == 0


def test_an_unpacked_archive_is_skipped(tmp_path: Path) -> None:
    done = Repository(tmp_path / "archive").check()
    assert done.returncode == 0
    assert done.stdout == "subjects: skipped: no git repository here\n"


def test_a_repository_without_commits_is_skipped(repository: Repository) -> None:
    done = repository.check()
    assert done.returncode == 0
    assert "skipped" in done.stdout


def test_a_machine_without_git_is_skipped(repository: Repository, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("sh", "dirname", "env"):
        (tools / tool).symlink_to(shutil.which(tool) or tool)
    done = subprocess.run(
        [tools / "sh", repository.path / "scripts" / SCRIPT.name],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0
    assert done.stdout == "subjects: skipped: git is not installed\n"
