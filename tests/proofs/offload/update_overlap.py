"""Updates as gradients arrive (Fuyou) against updates after the backward pass, on drawn machines."""

from __future__ import annotations

import heapq
import random
from collections import defaultdict, deque
from collections.abc import Sequence

from jaxllm.plan.formulas.update_timeline import LayerTimes, Task, play, update_span, update_tasks
from tests.proofs.harness import proof


def drawn(rng: random.Random) -> tuple[list[LayerTimes], float, int]:
    """Layers of a machine in which any of its parts may be the slowest, the forward pass, and a window."""
    rates = [10 ** rng.uniform(-2, 1) for _ in LayerTimes._fields]
    alike = rng.random() < 0.5
    layers = []
    for _ in range(rng.randint(2, 40)):
        size = 1.0 if alike else rng.uniform(0.2, 3)
        layers.append(LayerTimes(*(rate * size for rate in rates)))
    return layers, rng.uniform(0, 0.5) * sum(one.backward for one in layers), rng.randint(2, 8)


def events(tasks: Sequence[Task]) -> dict[str, tuple[float, float]]:
    """The same by events: a resource begins the head of its queue when what that waits for has ended."""
    queues: dict[str, deque[Task]] = defaultdict(deque)
    for task in tasks:
        queues[task.resource].append(task)
    found: dict[str, tuple[float, float]] = {}
    done: set[str] = set()
    running: list[tuple[float, str, str]] = []
    busy: set[str] = set()
    now = 0.0
    while True:
        for resource, queue in queues.items():
            if resource not in busy and queue and done.issuperset(queue[0].after):
                task = queue.popleft()
                found[task.name] = (now, now + task.seconds)
                busy.add(resource)
                heapq.heappush(running, (now + task.seconds, task.name, resource))
        if not running:
            assert not any(queues.values()), "a task waits for ever"
            return found
        now, name, resource = heapq.heappop(running)
        done.add(name)
        busy.discard(resource)


def by_hand(layer: LayerTimes, count: int, forward: float) -> tuple[float, float]:
    """Span of updates as gradients arrive and after the backward pass, on the host, layers alike, no limit of memory.

    It is the longest of the paths, which take every step but one at the slowest of their stages."""
    b, g, r, w, u, p = layer.backward, layer.gradients, layer.read, layer.write, layer.host_update, layer.parameters
    ends = []
    for last in (w, p):
        arrive = forward + b + g + u + last + (count - 1) * max(b, g, u, last)
        loaded = r + u + last + (count - 1) * max(r, u, last)
        ends.append((arrive, loaded, forward + count * b + u + last + (count - 1) * max(u, last)))
    arriving = max(end for one in ends for end in one[:2])
    return arriving, max(arriving, *(one[2] for one in ends))


@proof(
    "offload",
    count=300,
    sample=10,
    bound={"events": 1e-9, "by_hand": 1e-9, "above": 1e-9},
    counts=("host_less", "host_half", "device_less", "device_more"),
)
def updates_as_gradients_arrive(seed: int) -> dict[str, float]:
    """Drawn machines: the timeline by events and, for equal layers, by hand; the accelerator never idles longer when
    the host updates layers as their gradients arrive.

    Counted: machines on which it idles less, and at most half as long; the same where the device updates, and machines
    on which it idles longer then, because the next backward pass waits for an update that waits for the disk."""
    rng = random.Random(seed)
    layers, forward, window = drawn(rng)
    errors = {"events": 0.0, "by_hand": 0.0, "above": 0.0}
    spans = {}
    for on in ("host", "device"):
        for arriving in (True, False):
            tasks = update_tasks(layers, forward, window, arriving=arriving, on=on)
            times, again = play(tasks), events(tasks)
            span = spans[on, arriving] = update_span(tasks)
            errors["events"] = max(
                errors["events"],
                *(abs(a - b) / span.seconds for name in times for a, b in zip(times[name], again[name], strict=True)),
            )
    early, late = spans["host", True], spans["host", False]
    assert early.busy == late.busy
    errors["above"] = max(0.0, (early.idle - late.idle) / late.seconds)
    wide = len(layers)
    alike = [layers[0]] * wide
    for arriving, expected in zip((True, False), by_hand(layers[0], wide, forward), strict=True):
        found = update_span(update_tasks(alike, forward, wide, arriving=arriving)).seconds
        errors["by_hand"] = max(errors["by_hand"], abs(found - expected) / expected)
    near, far = spans["device", True], spans["device", False]
    slack = 1e-9 * late.seconds
    return errors | {
        "host_less": float(early.idle < late.idle - slack),
        "host_half": float(early.idle <= late.idle / 2),
        "device_less": float(near.idle < far.idle - slack),
        "device_more": float(near.idle > far.idle + slack),
    }
