"""What the driver does, as sentences for people. Pure: actions in, occurrences out."""

from __future__ import annotations

from dataclasses import dataclass

from laminar.core.reconcile import Action, Create, Fence, Kill, PublishChain, RequestStop, SetCondition, SetPhase, Stop


@dataclass(frozen=True, slots=True)
class Occurrence:
    """`kind` is a stable word for programs, `text` for people."""

    kind: str
    text: str


def describe(action: Action) -> Occurrence | None:
    """What people should read of an action; None: nothing (routine, or said by another action)."""
    match action:
        case Create(slot=slot, reason="wanted"):
            return Occurrence("started", f"{slot} started")
        case Create(slot=slot, life=life, reason=reason):
            return Occurrence("replaced", f"{slot} replaced by life {life}: {reason}")
        case Kill(slot=slot, life=life, reason=reason):
            return Occurrence("killed", f"{slot} (life {life}) killed: {reason}")
        case PublishChain(reason="not acknowledged yet"):
            return None
        case PublishChain(epoch=epoch, members=members, reason=reason):
            chain = " > ".join(node.slot for node in members)
            return Occurrence("epoch", f"relay chain epoch {epoch}: {chain} ({reason})")
        case SetPhase(phase=phase, reason=reason):
            return Occurrence("phase", f"job {phase}: {reason}")
        case SetCondition(name=name, text=text):
            return Occurrence("condition", f"{name}: {text}" if text else f"{name} has passed")
        case Fence() | Stop() | RequestStop():
            return None
