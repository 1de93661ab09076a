"""``jaxllm simulate``: serves a trace with the engine's own scheduler on devices that are not here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from jaxllm.cli.command_parser import check_outputs, parse_command
from jaxllm.cli.errors import UsageError
from jaxllm.cli.serving_arguments import cluster_of, hardware_table, served_model, with_pools

if TYPE_CHECKING:
    from jaxllm.simulate import Deployment, RequestTrace, Simulation
    from jaxllm.simulate.recorded import RecordedSteps
    from jaxllm.simulate.routing import Router


def simulate(argv: list[str]) -> int:
    """Simulate serving on devices elsewhere: `jaxllm simulate MODEL --on h200:8`."""

    def run(
        model: Annotated[str, tyro.conf.Positional],
        /,
        on: str,
        trace: str = "poisson:1",
        mesh: str | None = None,
        pools: str | None = None,
        overlap: Literal["none", "nano"] = "none",
        mla: Literal["exact", "tpla"] = "exact",
        kv_span: bool = False,
        lengths: str = "sharegpt",
        requests: int = 300,
        slo: str = "ttft=1,tpot=0.05",
        weights: str = "bfloat16",
        kv_dtype: Literal["auto", "bfloat16", "int8", "fp8", "int4", "bfp4"] = "auto",
        max_sequences: int = 256,
        max_batched_tokens: int = 2048,
        max_len: int | None = None,
        page_size: int = 32,
        decode_steps: int = 8,
        host_ms: float = 0.0,
        prefix_cache: bool = True,
        preemption: Literal["recompute", "swap"] = "recompute",
        policy: Literal["first-come", "priority", "fair", "shortest"] = "first-come",
        phase_split: str = "whole",
        router: Literal["round-robin", "shortest-queue", "prefix-aware", "mixing-penalty", "all"] = "shortest-queue",
        replicas: int = 1,
        failures: str = "",
        autoscale: str = "",
        extra_servers: float = 0.0,
        prefixes: int = 0,
        prefix_tokens: int = 0,
        steps: Path | None = None,
        curve: bool = True,
        price: str = "",
        hardware: Path | None = None,
        seed: int = 0,
        html: Path | None = None,
        json: Path | None = None,
    ) -> int:
        """Prints throughput, TTFT and TPOT, goodput, cache use, cost and energy of a model served on devices elsewhere.

        The scheduler, page allocator, prefix cache and policies are the engine's own; the time of a step is a formula
        (docs/serve/simulate.md). Nothing is compiled and no weights are read.

        Args:
            model: recipe, FILE.py:FUNCTION, config.json, or a model's directory.
            on: devices: a topology such as h200:1x8 or v6e:2x4, or a number of them, h200:8.
            trace: poisson:RATE, bursty:RATE, uniform:RATE (requests per second), closed:CLIENTS, a name of --lengths
                such as sharegpt:RATE, which arrive as poisson:RATE, or a file of JSON lines
                {"at": s, "prompt_tokens": n, "max_tokens": n}.
            mesh: serving mesh of one engine, such as tensor=4; by default tensor parallelism over all devices. Devices
                beyond it are further engines behind a router.
            pools: instead of --mesh, weights and attention of an engine on devices of their own, such as
                "model=tensor:2, attention=tensor:4", or engines for each phase, such as
                "prefill=tensor:2 x1, decode=tensor:4 x1" (docs/serve/pools.md).
            overlap: with an attention pool, nano: two halves of a step take turns on both parts.
            mla: tpla: latents of multi-head latent attention in slices over tensor, as for `jaxllm serve`.
            kv_span: pages of a request are spread over context, as for `jaxllm serve`.
            lengths: sharegpt, alpaca, conversation, code, PROMPT/OUTPUT, or a CSV file of prompt,output.
            requests: number of requests, if the trace is not a file.
            slo: objective: seconds to the first token and per output token after it, and the share of requests that
                should meet both (share=0.9).
            weights: format of the matrices: bfloat16, int8, int4, nf4, lut4, lut3, mxfp4; fp8 as other engines have it.
            kv_dtype: format of the KV cache.
            max_sequences: sequences that are in a batch at a time.
            max_batched_tokens: token budget of a step.
            max_len: longest sequence in tokens; by default that of the trace.
            page_size: positions of a KV cache page.
            decode_steps: tokens that a sequence decodes on the device in one step, while no request waits.
            host_ms: milliseconds of a step in which the devices wait for the engine's host; none for this engine, which
                runs a step ahead.
            prefix_cache: share the KV cache of common prefixes.
            preemption: recompute, or swap to the host.
            policy: scheduling policy.
            phase_split: tokens of prompts in a step while sequences decode, as for `jaxllm serve`.
            router: policy of the router over several engines; all: compare them.
            replicas: as many times the devices of --on, all behind one router.
            failures: engines that fail and are repaired: mtbf=SECONDS,repair=SECONDS, and
                requests=fail|retry|migrate, retries=N, seed=N (docs/serve/simulate.md).
            autoscale: number of engines that follows the load, as the Kubernetes HPA has it: min=N,max=N,target=NUMBER,
                and metric=requests|queue|cache|busy, period, up, down, tolerance, start, load
                (docs/serve/simulate.md).
            extra_servers: share of engines more, such as 0.3, that serve as much more within the rated power of those
                in --on, under a power cap; half of the requests and engines have low priority.
            prefixes: number of prefixes of which each request has one.
            prefix_tokens: length of these prefixes, in addition to the prompts.
            steps: file of `jaxllm bench MODEL --record FILE`: a step takes as long as was measured there, on one device
                of --on, in place of the formula; then model and formats count for the memory alone.
            curve: also serve the trace at other rates, up to the largest that meets the objective (open loop).
            price: dollars an hour of one device, such as h200=2.5; the table's list prices by default.
            hardware: TOML or JSON file that changes or adds kinds of hardware.
            seed: seed of arrivals and lengths.
            html: page to write, with curves and the timeline of batches.
            json: file to write the figures to.
        """
        import math
        from dataclasses import replace

        from jaxllm.files import write_json
        from jaxllm.infer.engine_config import EngineConfig
        from jaxllm.infer.scheduling.policies import Fair, FirstCome, Priority, Shortest
        from jaxllm.observe.html_report import write
        from jaxllm.simulate import Deployment, ServiceObjective, make_trace
        from jaxllm.simulate import simulate as run_simulation
        from jaxllm.simulate.fleet.autoscaler import AutoscalePolicy
        from jaxllm.simulate.fleet.fleet_simulator import simulate_fleet
        from jaxllm.simulate.fleet.replica_failures import ReplicaFailures
        from jaxllm.simulate.oversubscription import oversubscribe, oversubscription_text
        from jaxllm.simulate.pools import DisaggregatedPools, simulate_pools
        from jaxllm.simulate.routing import ROUTERS
        from jaxllm.simulate.simulation_report import html_report, router_table, text_report
        from jaxllm.simulate.simulator import rate_curve
        from jaxllm.simulate.steady_state import mixing_penalty
        from sharding import MeshSpec

        check_outputs(html=html, json=json)
        config, longest = served_model(model)
        cluster = cluster_of(on, hardware_table(hardware, price))
        objective = ServiceObjective.parse(slo)
        requested = make_trace(
            trace, lengths=lengths, count=requests, seed=seed, prefixes=prefixes, prefix_tokens=prefix_tokens
        )
        sizes = EngineConfig(
            max_sequences=max_sequences, max_batched_tokens=max_batched_tokens, max_len=max_len or requested.longest,
            page_size=page_size, decode_steps=decode_steps, prefix_cache=prefix_cache, preemption=preemption,
            kv_dtype=kv_dtype, samplers=("plain",), phase_split=phase_split, mla=mla, kv_span=kv_span,
        )  # fmt: skip
        chosen = MeshSpec.parse(mesh) if mesh else MeshSpec.parse(f"tensor={cluster.devices}")
        base = Deployment(config, cluster, chosen, sizes, weights, longest, host_seconds=host_ms / 1e3)
        if replicas < 1:
            raise UsageError(f"--replicas {replicas}: give 1 or more.")
        base = replace(base, copies=replicas)
        deployment = base if pools is None else with_pools(base, pools, overlap, mesh)
        if pools is None and overlap != "none":
            raise UsageError("--overlap is simulated with an attention pool alone: give --pools, or leave it out.")
        clock = None
        if steps is not None:
            if pools is not None or extra_servers or host_ms:
                raise UsageError(
                    "--steps are of one device and its host; leave --pools, --extra-servers and --host-ms out."
                )
            clock = measured_clock(steps, base)
            print(f"steps: those of {clock.model}, measured on {clock.device}")
        policies = {"first-come": FirstCome, "priority": Priority, "fair": Fair, "shortest": Shortest}
        make_policy = None if policy == "first-come" else policies[policy]

        failing = ReplicaFailures.parse(failures) if failures else None
        scaling = AutoscalePolicy.parse(autoscale) if autoscale else None
        if (failing or scaling) and (extra_servers or isinstance(deployment, DisaggregatedPools)):
            raise UsageError(
                "--failures and --autoscale are of whole engines at their full power; leave --extra-servers and pools "
                "of prefill and decode out."
            )
        if isinstance(deployment, DisaggregatedPools) and (extra_servers or router != "shortest-queue"):
            raise UsageError(
                "engines of prefill and decode pools get the next request when they have the fewest, at their full "
                "power; leave --router and --extra-servers out."
            )

        def make_router(name: str) -> Router:
            assert isinstance(deployment, Deployment)
            return mixing_penalty(deployment) if name == "mixing-penalty" else ROUTERS[name]()

        def served(what: RequestTrace, name: str = "shortest-queue" if router == "all" else router) -> Simulation:
            if isinstance(deployment, DisaggregatedPools):
                return simulate_pools(deployment, what, policy=make_policy)
            host = 0.0 if clock is None else clock.host
            if failing or scaling:
                return simulate_fleet(
                    deployment, what, failures=failing, autoscale=scaling, router=make_router(name),
                    policy=make_policy, clock=clock, host=host,
                )  # fmt: skip
            return run_simulation(
                deployment, what, router=make_router(name), policy=make_policy, clock=clock, host=host
            )

        simulation = served(requested)
        figures, knee, tried = simulation.figures(objective), None, []
        if curve and math.isfinite(requested.rate):
            knee, tried = rate_curve(served, requested, objective)
        print(text_report(simulation, figures, knee))
        if router == "all":
            print(router_table({name: served(requested, name) for name in ROUTERS}))
        if extra_servers:
            assert isinstance(deployment, Deployment)
            print(oversubscription_text(oversubscribe(deployment, requested, extra_servers)))
        if html is not None:
            write(html_report(simulation, figures, tried, knee or 0.0), html)
            print(f"saved: {html}")
        if json is not None:
            write_json(json, {**figures, "knee": knee, "curve": [[rate, one] for rate, one in tried]})
            print(f"saved: {json}")
        return 0

    return parse_command(run, argv, "jaxllm simulate")


def measured_clock(file: Path, deployment: Deployment) -> RecordedSteps:
    """Step clock of a file of measured steps, for engines of one device.

    Raises:
        UsageError: engines have several devices, or the steps were measured with too small batches.
        ValueError: the file has none.
    """
    from jaxllm.simulate.recorded import RecordedSteps

    found, sizes = RecordedSteps.read(file), deployment.engine
    if deployment.engine_devices > 1:
        raise UsageError(
            f"--steps are of one device, and an engine has {deployment.engine_devices}: give --mesh tensor=1."
        )
    for kind, needed, option in (
        (True, sizes.decode_buckets, f"--max-sequences {sizes.max_sequences}"),
        (False, sizes.prompt_buckets, f"--max-batched-tokens {sizes.max_batched_tokens}"),
    ):
        most = max((one.rows for one in found.programs if one.decode == kind), default=0)
        if needed and needed[-1] > most:
            programs = f"{'decode' if kind else 'prompt'} programs of up to {most} rows"
            raise UsageError(
                f"--steps {file} has {programs}, and {option} needs {needed[-1]}: give a smaller one, or record larger "
                "--batches and a longer --prompt."
            )
    return found
