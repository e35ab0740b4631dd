"""How a slot becomes a process: its sockets, its settings, its command.

machine-<i>   a pretend machine: RUN/machines/<i> with one relay and its hand-off socket
sockets       bound here once, on free loopback ports, and inherited by every life of the slot
"""

from __future__ import annotations

import shutil
import socket
import sys
from pathlib import Path

from laminar.cli.children import Launch
from laminar.cli.errors import BadInput
from laminar.cli.run_folder import RunFolder
from laminar.core.identity import Role
from laminar.core.reconcile import Create
from laminar.core.snapshot import Place, Spec, places
from laminar.shell.settings import Common, SettingsError
from laminar.shell.sockets import bound_address, listening_socket

LOOPBACK = "127.0.0.1"


def machine_names(num_machines: int) -> tuple[str, ...]:
    return tuple(f"machine-{i}" for i in range(num_machines))


class Launchpad:
    """The embedded run's places. Holds every listening socket until `close`."""

    def __init__(self, run: RunFolder, job_name: str, uid: str, spec: Spec, port: int) -> None:
        self._run = run
        self._job_name = job_name
        self._uid = uid
        self._spec = spec
        self.token = run.token()
        self._http: dict[str, socket.socket] = {}
        self._data: dict[str, socket.socket] = {}
        for place in places(spec):
            self._http[place.slot] = _listen(port if place.role is Role.POOL else 0)
            if place.role is Role.RELAY:
                self._data[place.slot] = _listen(0)

    @property
    def pool_url(self) -> str:
        return self.http_url("pool-0")

    def http_url(self, slot: str) -> str:
        return f"http://{bound_address(self._http[slot])}"

    def data_address(self, slot: str) -> str:
        """Of a relay's chain listener."""
        return bound_address(self._data[slot])

    def handoff(self, machine: int) -> Path:
        return self._run.handoff_socket(machine, self._uid)

    def launch(
        self, create: Create, generation: int, restore_step: int | None, checkpoint: Path | None = None
    ) -> Launch:
        """One life. `restore_step`: the trainer restores no checkpoint above it. `checkpoint`: what a new generation
        of the pool begins from."""
        place = Place(create.role, create.index, create.node)
        machine = self._spec.nodes.index(create.node)
        self._run.machine_folder(machine).mkdir(parents=True, exist_ok=True)
        self.handoff(machine).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        http = self._http[place.slot].fileno()
        sockets = [http]
        folder = self._run.slot_folder(place.slot)
        folder.mkdir(parents=True, exist_ok=True)
        common = Common(
            job=self._job_name,
            job_uid=self._uid,
            token=self.token,
            spec_path=self._run.spec_file,
            generation=generation,
            pool_url=self.pool_url,
            slot=place.slot,
            life=create.life,
            listen=f"fd:{http}",
            dir=folder,
            machine=place.node,
        )
        variables = common.to_env() | self._role_variables(place, create.life, restore_step)
        if checkpoint is not None:
            variables["LAMINAR_CHECKPOINT"] = str(checkpoint)
        if place.role is Role.RELAY:
            data = self._data[place.slot].fileno()
            sockets.append(data)
            variables["LAMINAR_DATA_LISTEN"] = f"fd:{data}"
        # A file or folder in the user's working directory must not shadow a module of the services.
        variables["PYTHONSAFEPATH"] = "1"
        command = (sys.executable, "-m", f"laminar.{place.role}")
        log = self._run.log_file(place.slot)
        return Launch(place.slot, create.life, command, variables, tuple(sockets), log)

    def close(self) -> None:
        """Closes the sockets and removes what lies outside the run folder."""
        for sock in (*self._http.values(), *self._data.values()):
            sock.close()
        for machine in range(len(self._spec.nodes)):
            path = self.handoff(machine)
            path.unlink(missing_ok=True)
            if path.parent != self._run.machine_folder(machine):
                shutil.rmtree(path.parent, ignore_errors=True)

    def _role_variables(self, place: Place, life: int, restore_step: int | None) -> dict[str, str]:
        handoff = str(self.handoff(self._spec.nodes.index(place.node)))
        match place.role:
            case Role.POOL:
                self._run.store.mkdir(parents=True, exist_ok=True)
                return {"LAMINAR_STORE": str(self._run.store)}
            case Role.RELAY:
                return {"LAMINAR_HANDOFF": handoff}
            case Role.ROLLOUT:
                return {"LAMINAR_HANDOFF": handoff, "LAMINAR_INDEX": str(place.index)}
            case Role.TRAINER:
                self._run.checkpoints.mkdir(parents=True, exist_ok=True)
                return {
                    "LAMINAR_ATTEMPT": str(life),
                    "LAMINAR_CHECKPOINTS": str(self._run.checkpoints),
                    "LAMINAR_MODEL_OUT": str(self._run.model),
                    "LAMINAR_RESTORE_STEP": "" if restore_step is None else str(restore_step),
                }


def _listen(port: int) -> socket.socket:
    try:
        return listening_socket(f"{LOOPBACK}:{port}")
    except SettingsError as error:
        if port == 0:
            raise
        raise BadInput(
            f"Port {port} is taken by another program. Choose another with --port, or leave --port out: "
            "a free one is then used and shown."
        ) from error
