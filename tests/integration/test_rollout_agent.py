"""A real agent with its real engine and graders, a real relay, and a minimal pool that speaks the contract."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from aiohttp import web
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from laminar.relay.plane import DataPlane
from laminar.relay.serving import Credentials
from laminar.relay.store import StoreSizes
from laminar.shell.handover import hand_over
from laminar.shell.process import child_environment, descendants, kill_tree, process_alive
from laminar.shell.settings import Common
from laminar.shell.transport import listen_tcp, listen_unix
from laminar.wire import codec
from laminar.wire.dataplane import (
    Command,
    CommandKind,
    GradeItem,
    GroupGrant,
    ItemReply,
    LeaseCall,
    LeaseKind,
    LeaseReply,
    Outcome,
    ProgressCall,
    ProgressReply,
    SampleGrant,
)
from laminar.wire.manifest import layout, make_manifest
from laminar.wire.messages import ChainEpoch, ChainMember, EngineLoad, Heartbeat, MemberState, Register
from laminar.wire.spec import LaminarJob

TOKEN, UID, SLOT = "a token", "uid-1", "rollout-0"
EOS, VOCABULARY, TEMPERATURE = 1, 64, 0.9
NEVER = VOCABULARY + 1000
DEADLINE_S = 60.0
PROMPT = [5, 6, 7]


@dataclass
class Sample:
    """The pool's row: what is durable, and what it was told of its end."""

    term: int = 1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str = ""
    grade: GradeItem | None = None


class Pool:
    """Answers as the contract says; tests change `newest`, queue groups, and read `samples`."""

    def __init__(self) -> None:
        self.newest: int | None = None
        self.digest = ""
        self.registers: list[Register] = []
        self.incarnations: dict[str, int] = {}
        self.current = 0
        self.beats: list[Heartbeat] = []
        self.samples: dict[str, Sample] = {}
        self.queue: list[GroupGrant] = []
        self.commands: asyncio.Queue[Command] = asyncio.Queue()
        self.streams = 0
        self.refused = 0
        self.changed = asyncio.Condition()

    @property
    def load(self) -> EngineLoad | None:
        """Of the last heartbeat."""
        return self.beats[-1].load if self.beats else None

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/register", self.register)
        app.router.add_post("/v1/heartbeat", self.heartbeat)
        app.router.add_post("/v1/lease", self.lease)
        app.router.add_post("/v1/progress", self.progress)
        app.router.add_get(f"/v1/commands/{SLOT}", self.stream)
        return app

    async def register(self, request: web.Request) -> web.Response:
        assert request.headers["authorization"] == f"Bearer {TOKEN}"
        register = Register.model_validate_json(await request.read())
        if register.nonce not in self.incarnations:
            self.registers.append(register)
            self.current = self.incarnations[register.nonce] = len(self.registers)
        return web.json_response({"incarnation": self.incarnations[register.nonce], "generation": 1})

    async def heartbeat(self, request: web.Request) -> web.Response:
        beat = Heartbeat.model_validate_json(await request.read())
        if beat.incarnation != self.current:
            return superseded()
        self.beats.append(beat)
        return web.json_response({"newest": self.newest})

    async def lease(self, request: web.Request) -> web.Response:
        call = codec.decode(await request.read(), LeaseCall)
        ends_s = time.monotonic() + min(call.wait_s, 0.5)
        while call.incarnation == self.current:
            if self.newest is not None and call.version != self.newest:
                return packed(LeaseReply(kind=LeaseKind.REFRESH, version=self.newest, digest=self.digest))
            if self.queue and call.version is not None:
                groups, self.queue = self.queue, []
                return packed(
                    LeaseReply(kind=LeaseKind.GRANT, version=call.version, groups=groups, temperature=TEMPERATURE)
                )
            if time.monotonic() > ends_s:
                return packed(LeaseReply(kind=LeaseKind.WAIT))
            await asyncio.sleep(0.01)
        return superseded()

    async def progress(self, request: web.Request) -> web.Response:
        call = codec.decode(await request.read(), ProgressCall)
        if call.incarnation != self.current:
            self.refused += 1
            return superseded()
        appends = [self.append(item) for item in call.appends]
        finishes: list[ItemReply] = []
        for item in call.finishes:
            verdict = self.verdict(item.id, item.term)
            if verdict is Outcome.OK:
                assert item.length == len(self.samples[item.id].tokens)
                self.samples[item.id].finish = item.reason
            finishes.append(ItemReply(id=item.id, verdict=verdict))
        grades: list[ItemReply] = []
        for item in call.grades:
            verdict = self.verdict(item.id, item.term)
            if verdict is Outcome.OK:
                assert self.samples[item.id].finish
                self.samples[item.id].grade = item
            grades.append(ItemReply(id=item.id, verdict=verdict))
        return packed(ProgressReply(appends=appends, finishes=finishes, grades=grades))

    def append(self, item) -> ItemReply:
        verdict = self.verdict(item.id, item.term)
        if verdict is not Outcome.OK:
            return ItemReply(id=item.id, verdict=verdict)
        row = self.samples[item.id]
        if item.offset > len(row.tokens):
            return ItemReply(id=item.id, verdict=Outcome.GAP, durable=len(row.tokens))
        tokens, known = codec.unpack_tokens(item.tokens), row.tokens[item.offset :]
        assert tokens[: len(known)] == known[: len(tokens)], "an overlap differs"
        row.tokens[item.offset :] = tokens
        row.logprobs[item.offset :] = codec.unpack_logprobs(item.logprobs)
        return ItemReply(id=item.id, verdict=Outcome.OK, durable=len(row.tokens))

    def verdict(self, name: str, term: int) -> Outcome:
        return Outcome.OK if name in self.samples and self.samples[name].term == term else Outcome.SUPERSEDED

    async def stream(self, request: web.Request) -> web.StreamResponse:
        if int(request.query["incarnation"]) != self.current:
            return superseded()
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(codec.frame(Command(kind=CommandKind.HELLO)))
        self.streams += 1
        try:
            while True:
                try:
                    command = await asyncio.wait_for(self.commands.get(), 1.0)
                except TimeoutError:
                    command = Command(kind=CommandKind.PING)
                await response.write(codec.frame(command))
        finally:
            self.streams -= 1

    def offer(self, name: str, *, budget: int, count: int = 1, term: int = 1, greedy: bool = False) -> GroupGrant:
        """A group whose samples continue from what is durable."""
        grants: list[SampleGrant] = []
        for index in range(count):
            key = f"{name}/{index}"
            row = self.samples.setdefault(key, Sample())
            row.term = term
            grants.append(
                SampleGrant(
                    id=key, index=index, term=term, seed=100 + index, max_new_tokens=budget, greedy=greedy,
                    tokens=codec.pack_tokens(row.tokens), logprobs=codec.pack_logprobs(row.logprobs),
                )
            )  # fmt: skip
        return GroupGrant(
            group=name, prompt_tokens=codec.pack_tokens(PROMPT), prompt_text="p", answer="w9", samples=grants
        )


def packed(message) -> web.Response:
    return web.Response(body=codec.encode(message), content_type="application/msgpack")


def superseded() -> web.Response:
    return web.json_response({"error": "superseded", "detail": "a newer incarnation"}, status=410)


def tiny_model(seed: int, hidden: int = 32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=8192, initializer_range=0.3, tie_word_embeddings=True, eos_token_id=EOS,
        bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def logprobs_of(model: LlamaForCausalLM, response: list[int]) -> list[float]:
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([PROMPT + response])).logits[0]
    logprobs = torch.log_softmax(logits / TEMPERATURE, dim=-1)
    return [float(logprobs[len(PROMPT) - 1 + index, token]) for index, token in enumerate(response)]


class Scene:
    """Pool, relay and agent of one test."""

    def __init__(self, folder: Path, *, endless: bool, num_ids: int) -> None:
        self.folder, self.num_ids = folder, num_ids
        self.pool = Pool()
        self.endless = endless
        self.process: asyncio.subprocess.Process
        self.port = 0
        self._runner: web.AppRunner | None = None
        listener = listen_tcp(socket.create_server(("127.0.0.1", 0)))
        self.relay_address = listener.address
        self.plane = DataPlane(
            "relay-0",
            Credentials(TOKEN, UID),
            StoreSizes(2),
            listener,
            listen_unix(str(folder / "h.sock")),
            lambda: None,
        )
        self.plane.start()
        member = ChainMember(slot="relay-0", address=self.relay_address)
        self.plane.apply_epoch(ChainEpoch(epoch=1, members=[member]))

    def publish(self, version: int, model: LlamaForCausalLM) -> None:
        tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
        entries = layout([(name, "F32", tuple(tensor.shape)) for name, tensor in tensors.items()])
        buffer = bytearray(max(entry.offset + entry.nbytes for entry in entries))
        for entry in entries:
            buffer[entry.offset : entry.offset + entry.nbytes] = tensors[entry.name].numpy().tobytes()
        manifest = make_manifest(
            job_uid=UID, version=version, step=version, attempt=1, tensors=entries, buffer=buffer, chunk_bytes=2**20
        )
        hand_over(self.relay_address, TOKEN, UID, 1, manifest, buffer)
        self.pool.digest = manifest.digest
        self.pool.newest = version

    async def open_pool(self) -> None:
        self._runner = web.AppRunner(self.pool.app(), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close_pool(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    async def start_agent(self) -> None:
        model_folder = self.folder / "model"
        tiny_model(0).config.save_pretrained(model_folder)
        if self.endless:
            (model_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": NEVER}))
        Tokenizer(models.WordLevel({f"w{i}": i for i in range(self.num_ids)}, "w0")).save(
            str(model_folder / "tokenizer.json")
        )
        job = {
            "metadata": {"name": "test"},
            "spec": {
                "steps": 1, "model": {"source": f"file:{model_folder}"},
                "data": {"train": {"source": "file:/unused"}, "maxPromptTokens": 16},
                "rewards": [{"name": "last", "type": "exact", "extract": {"regex": r"(\w+)$"}}],
                "sampling": {"maxResponseTokens": 4096, "temperature": TEMPERATURE},
                "rollout": {"replicas": 1, "engine": {"maxRunning": 8}},
            },
        }  # fmt: skip
        spec = self.folder / "job.json"
        spec.write_text(LaminarJob.model_validate(job).model_dump_json(by_alias=True))
        common = Common(
            job="test", job_uid=UID, token=TOKEN, spec_path=spec, generation=1,
            pool_url=f"http://127.0.0.1:{self.port}", slot=SLOT, life=1, listen="127.0.0.1:0", dir=self.folder,
            machine="m0",
        )  # fmt: skip
        environment = child_environment(
            **common.to_env(), LAMINAR_INDEX="0", LAMINAR_HANDOFF=str(self.folder / "h.sock")
        )
        with (self.folder / "agent.log").open("wb") as log:
            self.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "laminar.rollout", env=environment, stderr=log
            )

    async def until(self, condition: Callable[[], object], what: str) -> None:
        ends_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.returncode is None, f"the agent ended before: {what}\n{self.log()}"
            assert time.monotonic() < ends_s, f"not in time: {what}\n{self.log()}"
            await asyncio.sleep(0.01)

    def engine_pid(self) -> int:
        for pid in descendants(self.process.pid):
            with suppress(FileNotFoundError):
                if b"torch_engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return 0

    def log(self) -> str:
        return (self.folder / "agent.log").read_text()

    def agent_maps(self, library: str) -> bool:
        return library in Path(f"/proc/{self.process.pid}/maps").read_text()

    def graded(self, *names: str) -> bool:
        return all(self.pool.samples[name].grade is not None for name in names)


@asynccontextmanager
async def scene_of(folder: Path, *, endless: bool = True, num_ids: int = VOCABULARY) -> AsyncIterator[Scene]:
    scene = Scene(folder, endless=endless, num_ids=num_ids)
    await scene.open_pool()
    await scene.start_agent()
    try:
        yield scene
    finally:
        if scene.process.returncode is None:
            kill_tree(scene.process.pid)
            await scene.process.wait()
        await scene.close_pool()
        scene.plane.close()


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        ticks += int(values[11]) + int(values[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def test_a_group_is_generated_with_the_newest_weights_and_graded(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path, endless=False) as scene:
            pool, model = scene.pool, tiny_model(11)
            await asyncio.to_thread(scene.publish, 1, model)
            pool.queue = [pool.offer("g", budget=40, count=4), pool.offer("e", budget=12, greedy=True)]
            names = [f"g/{index}" for index in range(4)] + ["e/0"]
            await scene.until(lambda: scene.graded(*names), "all samples are graded")
            for name in names:
                row = pool.samples[name]
                assert row.logprobs == pytest.approx(logprobs_of(model, row.tokens), abs=1e-4)
                grade, last = row.grade, [token for token in row.tokens if token != EOS][-1:]
                assert grade is not None
                assert (grade.status, row.finish) == ("ok", "stop" if row.tokens[-1] == EOS else "length")
                assert grade.reward == float(row.finish == "stop" and last == [9])
            # A version that does not fit is refused, and the old one stays live.
            await asyncio.to_thread(scene.publish, 2, tiny_model(12, hidden=16))
            await scene.until(lambda: "refused" in pool.beats[-1].note, "the refusal is in the heartbeat")
            assert pool.beats[-1].version == 1
            newer = tiny_model(13)
            await asyncio.to_thread(scene.publish, 3, newer)
            pool.queue = [pool.offer("h", budget=20)]
            await scene.until(lambda: scene.graded("h/0"), "the sample of version 3 is graded")
            row = pool.samples["h/0"]
            assert row.logprobs == pytest.approx(logprobs_of(newer, row.tokens), abs=1e-4)
            await scene.until(lambda: pool.beats[-1].state is MemberState.IDLE, "the agent is idle")
            family = [scene.process.pid, *descendants(scene.process.pid)]
            before_s, begin_s = cpu_s(family), time.monotonic()
            await asyncio.sleep(4.0)
            share = (cpu_s(family) - before_s) / (time.monotonic() - begin_s)
            assert share < 0.02, f"an idle replica takes {share:.1%} of a core"
            assert not scene.agent_maps("torch")

    asyncio.run(main())


def test_an_engine_that_dies_is_replaced_under_a_new_incarnation_and_its_samples_continue(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path) as scene:
            pool, model = scene.pool, tiny_model(11)
            await asyncio.to_thread(scene.publish, 1, model)
            pool.queue = [pool.offer("g", budget=2500, count=2)]
            await scene.until(lambda: pool.samples.get("g/0", Sample()).tokens, "tokens are streamed")
            os.kill(scene.engine_pid(), signal.SIGKILL)
            await scene.until(lambda: pool.current == 2, "the agent registers anew")
            assert len(pool.samples["g/0"].tokens) < 2500
            pool.queue = [pool.offer("g", budget=len(pool.samples["g/0"].tokens) + 50, count=2, term=2)]
            await scene.until(lambda: scene.graded("g/0", "g/1"), "the continued samples are graded")
            for name in ("g/0", "g/1"):
                row = pool.samples[name]
                assert row.logprobs == pytest.approx(logprobs_of(model, row.tokens), abs=2e-4)
            # Superseded by the pool: the engine is killed, and everything begins anew.
            engine = scene.engine_pid()
            pool.current = 99
            await scene.until(lambda: len(pool.registers) == 3, "a 410 makes it register again")
            assert not process_alive(engine)
            assert len({register.nonce for register in pool.registers}) == 3

    asyncio.run(main())


def test_adopted_samples_join_the_running_ones_and_cancelled_ones_stop(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path) as scene:
            pool, model = scene.pool, tiny_model(11)
            await asyncio.to_thread(scene.publish, 1, model)
            pool.queue = [pool.offer("long", budget=4000)]
            await scene.until(lambda: pool.samples.get("long/0", Sample()).tokens, "the first sample runs")
            adopted = pool.offer("adopted", budget=30)
            pool.commands.put_nowait(Command(kind=CommandKind.ADOPT, version=1, groups=[adopted]))
            other = pool.offer("other", budget=30)
            pool.commands.put_nowait(Command(kind=CommandKind.ADOPT, version=7, groups=[other]))
            await scene.until(lambda: scene.graded("adopted/0"), "the adopted sample is graded")
            await scene.until(lambda: pool.samples["other/0"].finish, "the one of another version is handed back")
            assert pool.samples["other/0"].finish == "declined"
            pool.commands.put_nowait(Command(kind=CommandKind.CANCEL, ids=["long/0"], terms=[1]))
            await scene.until(lambda: pool.load and not pool.load.running, "nothing runs any more")
            assert len(pool.samples["long/0"].tokens) < 4000

    asyncio.run(main())


def test_a_stopped_agent_goes_on_as_the_same_incarnation_and_drops_what_was_moved(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path) as scene:
            pool = scene.pool
            await asyncio.to_thread(scene.publish, 1, tiny_model(11))
            pool.queue = [pool.offer("moved", budget=4000), pool.offer("kept", budget=600)]
            await scene.until(lambda: pool.samples.get("moved/0", Sample()).tokens, "tokens are streamed")
            os.kill(scene.process.pid, signal.SIGSTOP)
            pool.samples["moved/0"].term = 2
            held = len(pool.samples["moved/0"].tokens)
            await asyncio.sleep(1.5)
            os.kill(scene.process.pid, signal.SIGCONT)
            await scene.until(lambda: scene.graded("kept/0"), "the sample that was not moved is graded")
            await scene.until(lambda: pool.load and not pool.load.running, "the moved one is not generated any more")
            assert (pool.current, len(pool.samples["moved/0"].tokens)) == (1, held)

    asyncio.run(main())


def test_a_pool_that_is_away_loses_nothing_and_sigterm_flushes(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path) as scene:
            pool, model = scene.pool, tiny_model(11)
            await asyncio.to_thread(scene.publish, 1, model)
            pool.queue = [pool.offer("done", budget=200), pool.offer("open", budget=4000)]
            await scene.until(lambda: pool.load and pool.load.running, "the samples run")
            await scene.close_pool()
            await asyncio.sleep(1.5)
            await scene.open_pool()
            await scene.until(lambda: scene.graded("done/0"), "what ended meanwhile is graded")
            assert (pool.current, len(pool.samples["done/0"].tokens)) == (1, 200)
            children = descendants(scene.process.pid)
            had = len(pool.samples["open/0"].tokens)
            scene.process.terminate()
            assert await asyncio.wait_for(scene.process.wait(), 10) == 0
            row = pool.samples["open/0"]
            assert had < len(row.tokens) < 4000
            assert row.logprobs == pytest.approx(logprobs_of(model, row.tokens), abs=2e-4)
            assert pool.beats[-1].state is MemberState.STOPPED
            assert not [pid for pid in children if process_alive(pid)]

    asyncio.run(main())


def test_nothing_outlives_an_agent_that_is_killed(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path) as scene:
            await scene.until(lambda: len(descendants(scene.process.pid)) >= 2, "engine and grader run")
            children = descendants(scene.process.pid)
            scene.process.kill()
            await scene.process.wait()
            ends_s = time.monotonic() + 5
            while any(process_alive(pid) for pid in children):
                assert time.monotonic() < ends_s, "children live on"
                await asyncio.sleep(0.01)

    asyncio.run(main())


def test_a_model_that_cannot_be_served_ends_the_agent_with_one_clear_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene_of(tmp_path, num_ids=VOCABULARY + 5) as scene:
            assert await asyncio.wait_for(scene.process.wait(), DEADLINE_S) == 2
            log = scene.log()
            assert f"makes ids up to {VOCABULARY + 4}, the model has {VOCABULARY} rows of embeddings" in log
            assert "Traceback" not in log

    asyncio.run(main())
