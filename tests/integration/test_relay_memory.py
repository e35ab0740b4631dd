"""A relay in a control group with a tight memory limit, killed while an engine outside reads from it."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from laminar.shell.handoff import SlotReused, open_version
from laminar.shell.handover import HandedOver, HandOverRefused, hand_over
from laminar.shell.process import child_environment
from laminar.wire.links import OfferVerdict
from laminar.wire.manifest import Manifest, layout, make_manifest

HOST = Path(__file__).with_name("standin_host.py")
ROOT = Path("/sys/fs/cgroup")
TOKEN, UID = "token", "uid"
SIZE = 48 << 20
NUM_SLOTS = 3


class Group:
    """A child of our own memory control group, of either version. The limit holds for all lives of the relay in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir()
        self._is_v2 = (path / "memory.max").exists()
        if not self._is_v2 and not (path / "memory.limit_in_bytes").exists():
            path.rmdir()
            raise OSError(f"{path.parent} gives its children no memory limit")

    @property
    def used_bytes(self) -> int:
        return int((self.path / ("memory.current" if self._is_v2 else "memory.usage_in_bytes")).read_text())

    def limit(self, num_bytes: int) -> None:
        (self.path / ("memory.max" if self._is_v2 else "memory.limit_in_bytes")).write_text(str(num_bytes))

    @property
    def num_oom_kills(self) -> int:
        text = (self.path / ("memory.events" if self._is_v2 else "memory.oom_control")).read_text()
        found = re.search(r"^oom_kill (\d+)$", text, re.MULTILINE)
        assert found is not None, text
        return int(found[1])

    def close(self) -> None:
        until(lambda: not (self.path / "cgroup.procs").read_text().strip())
        self.path.rmdir()


def own_groups() -> Iterator[Path]:
    """Folders of the memory control groups that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield ROOT / path.lstrip("/")
        elif "memory" in controllers.split(","):
            yield ROOT / "memory" / path.lstrip("/")


@pytest.fixture
def group() -> Iterator[Group]:
    why: list[str] = []
    for folder in own_groups():
        try:
            made = Group(folder / f"laminar-test-{os.getpid()}")
        except OSError as error:
            why.append(str(error))
            continue
        yield made
        made.close()
        return
    pytest.skip(f"no memory control group can be made here: {'; '.join(why) or 'none is mounted'}")


class Relay:
    """One slot; its lives run in the group."""

    def __init__(self, group: Group, folder: Path) -> None:
        self.handoff = str(folder / "relay.sock")
        self._log = folder / "relay.log"
        self._group = group
        self._epoch = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        enter = f'echo $$ > "{self._group.path}/cgroup.procs" && exec "$0" "$@"'
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                ["sh", "-c", enter, sys.executable, str(HOST), "relay-0", "127.0.0.1", self.handoff],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=child_environment(),
            )  # fmt: skip
        self.address: str = self._read()["address"]
        self._epoch += 1
        self.ask(epoch=self._epoch, members=[{"slot": "relay-0", "address": self.address}])

    def ask(self, **what: Any) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the relay ended: {self._log.read_text()}"
        return json.loads(line)

    def publish(self, version: int) -> HandedOver:
        manifest, buffer = weights(version)
        return hand_over(self.address, TOKEN, UID, 1, manifest, buffer)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self.process.stdin.close()
            self.process.stdout.close()
            self.process = None


@pytest.fixture
def relay(group: Group, tmp_path: Path) -> Iterator[Relay]:
    made = Relay(group, tmp_path)
    yield made
    made.kill()


def weights(version: int) -> tuple[Manifest, bytes]:
    buffer = bytes([version]) * SIZE
    tensors = layout([("w", "U8", (SIZE,))])
    made = make_manifest(job_uid=UID, version=version, step=version, attempt=1, tensors=tensors, buffer=buffer)
    return made, buffer


def until(condition: Callable[[], bool], wait_s: float = 20.0) -> None:
    ends_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < ends_s, "the condition did not come true in time"
        time.sleep(0.02)


def fill_and_limit(relay: Relay, group: Group) -> None:
    """All slots are in use, and the limit leaves half a version beside them."""
    relay.start()
    base_bytes = group.used_bytes
    for version in range(1, NUM_SLOTS + 1):
        assert relay.publish(version) is HandedOver.SENT
    assert group.used_bytes > NUM_SLOTS * SIZE
    group.limit(base_bytes + NUM_SLOTS * SIZE + SIZE // 2)


@pytest.mark.root
def test_a_relay_killed_while_an_engine_reads_comes_back_within_its_limit(relay: Relay, group: Group) -> None:
    fill_and_limit(relay, group)
    outcomes: list[HandedOver] = []
    with open_version(relay.handoff, TOKEN, UID, NUM_SLOTS) as held:
        held.verify()
        relay.kill()
        assert group.used_bytes > SIZE
        relay.start()
        trainer = threading.Thread(target=lambda: outcomes.append(relay.publish(4)))
        trainer.start()
        # The engine copies on for a while, then finds out.
        trainer.join(1.0)
        assert trainer.is_alive()
        with pytest.raises(SlotReused, match="gone"):
            held.check()
    trainer.join(10)
    assert outcomes == [HandedOver.SENT]
    for version in range(5, 8):
        relay.publish(version)
    assert relay.ask()["held"] == [5, 6, 7]
    assert group.num_oom_kills == 0


@pytest.mark.root
def test_an_engine_that_never_lets_go_costs_a_refusal_and_not_the_relay(relay: Relay, group: Group) -> None:
    fill_and_limit(relay, group)
    with open_version(relay.handoff, TOKEN, UID, NUM_SLOTS) as held:
        held.verify()
        relay.kill()
        relay.start()
        with pytest.raises(HandOverRefused, match="do not fit into the memory") as refused:
            relay.publish(4)
        assert refused.value.verdict is OfferVerdict.TOO_LARGE
    assert relay.publish(4) is HandedOver.SENT
    assert group.num_oom_kills == 0
